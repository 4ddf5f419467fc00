"""From a command line and a profile to one frozen plan: pure, on the standard library, pydantic and PyYAML alone."""
