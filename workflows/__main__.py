"""`python -m workflows ...` is `moerl ...`."""

from workflows.cli import main

if __name__ == "__main__":
    main()
