"""One file per backend, and what they share. None of them knows of the snapshot tree."""
