"""`python -m farcast` is the `farcast` command."""

from farcast.cli.main import main

if __name__ == "__main__":
    main()
