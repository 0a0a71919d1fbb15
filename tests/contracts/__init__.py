"""Contract suites: what every implementation of an interface must do, as plain functions. No pytest in here."""
