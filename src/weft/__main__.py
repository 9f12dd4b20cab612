"""``python -m weft``. The doctor runs before anything is installed, with the standard library alone."""

import sys


def main() -> int:
    try:
        return _main()
    except KeyboardInterrupt:  # while modules are imported; later the command line says so itself
        sys.stderr.write("weft: interrupted\n")
        return 130


def _main() -> int:
    if sys.argv[1:2] == ["exporter"]:  # runs for months: without the other commands it takes half the memory
        from weft.hardware.telemetry import exporter

        return exporter.main(sys.argv[2:])
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        if sys.argv[1:2] == ["doctor"]:
            from weft.hardware import doctor

            return doctor.main(sys.argv[2:])
        sys.stderr.write(
            f"weft's command line needs {error.name}, which is not installed: run `make setup`, or `pip install weft`.\n"
            "`python -m weft doctor` works without it.\n"
        )
        return 2
    from weft.cli import main as cli

    return cli()


if __name__ == "__main__":
    sys.exit(main())
