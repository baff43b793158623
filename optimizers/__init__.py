"""What an optimizer is: a record in a file of its own, which everything else reads."""
