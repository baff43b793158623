"""Starting the ranks of a job and watching them. Stands on the standard library and psutil, and imports no torch."""
