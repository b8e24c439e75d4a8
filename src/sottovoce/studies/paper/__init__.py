"""Every figure of the paper as data, and one runner for all of them.

`figures/*.toml`, `settings/*.toml` and `methods.toml` say what is drawn, on what, by whom;
`definition` reads them and makes the plans; `reproduce` trains what is missing; `outcomes` keeps
what came of it and says whether a claim holds; `page` draws and shows it; `frontier` is the study
of what the same budget buys.
"""
