"""The directory that owns layers, images and the tree: every path named once, every metadata write made here."""
