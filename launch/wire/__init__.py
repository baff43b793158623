"""What launcher and agents say to each other, and how it travels."""
