"""The REST API, one file per noun. A route reads its request, calls the service, and says what it did for the audit log."""
