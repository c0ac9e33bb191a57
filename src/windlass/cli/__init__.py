"""The command line: every command parses, then makes one call.

main        `windlass prepare`, `train`, `verify`, `doctor`; the list of all commands, and how errors become exit codes

Inside:

arguments   arguments that several commands share
checkpoint  `windlass checkpoint ...`
data        `windlass data ...`
group       answers settings written as options
launch      `windlass launch ...`
models      `windlass evaluate`, `generate`, `export`
recipes     `windlass init`, `import`, `keys`
run_lines   `windlass train --quiet` and `--json`
runs        `windlass status`, `stacks`, `profile`, `advise`, `bench`, `runs`, `report`, `sync`
"""
