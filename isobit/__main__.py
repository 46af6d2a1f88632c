"""`python -m isobit`: the same as the `isobit` command."""

from isobit.cli import main

raise SystemExit(main())
