"""`python -m sottovoce` is `sottovoce`."""

from sottovoce.cli.commands import main

if __name__ == "__main__":
    main()
