"""The command line. It catches signals before it imports anything else, so that none ends a run that could have been saved."""

from windlass.signals import install_signals

install_signals()

from windlass.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
