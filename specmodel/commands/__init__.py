"""The commands of the command line, one module each: `add_arguments(parser)`, `run(args) -> exit code`, `EXAMPLES`.

A module imports only the standard library at its top, so that help is instant; `run` imports the rest.
"""
