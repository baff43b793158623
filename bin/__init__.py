"""The commands of `lowtide`, one module each, and the executables of a checkout."""
