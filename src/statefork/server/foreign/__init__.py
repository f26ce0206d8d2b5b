"""Wire formats of others, served over the daemon's own services, so that their unmodified clients work here."""
