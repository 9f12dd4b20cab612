"""Reading and writing files: text, columns, YAML, Kubernetes objects, traces; errors name file, line and column."""
