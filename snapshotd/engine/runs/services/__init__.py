"""Services of sandboxes: their declarations, and their starts."""
