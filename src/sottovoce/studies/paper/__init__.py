"""Every figure of the paper as data, and one runner for all of them.

`figures/*.toml`, `settings/*.toml`, `methods.toml`   what is drawn, on what, by whom
`definition`  reads them, and refuses what it does not know
`expand`      a figure → the plans it needs
`outcomes`    what is kept of a run, and the files it is kept in
`runner`      trains what is missing and stores it as it comes
`moments`, `prototypes`   the two figures that are no sweeps
`table`       outcomes → one array over the seeds for every point
`checks`, `verdict`       a claim → holds, contradicted or undecided
`draw`        a figure as SVG
`page`, `claims`          what a reader sees: one page, one table
`reproduce`   the command
"""
