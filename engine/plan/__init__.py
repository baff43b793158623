"""What a training will take, in bytes and in seconds, before there is a process group; and the best of many configs."""
