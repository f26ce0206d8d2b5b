"""What tests of other projects import: nothing of the engine needs it."""
