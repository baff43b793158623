"""The `lowtide` commands, a module for each, and the scripts of a checkout."""
