"""Small helpers, which import nothing of the package but `errors`."""
