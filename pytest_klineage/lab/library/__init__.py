"""What the project has on disk: expert kernels, lineages and cards; and which cards a target gets."""
