"""What the project has on disk: expert kernels. Nothing is judged here."""
