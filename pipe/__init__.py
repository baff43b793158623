"""Pipeline parallelism: schedules as data, their simulator, the splitting of models, and the executor."""
