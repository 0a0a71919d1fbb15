"""The recording model endpoint inside a sandbox. `base.py` is its specification."""
