"""Run the simulator without the `workers` command: `python -m workers.simulator`."""

from workers.simulator.command import simulate

if __name__ == "__main__":
    simulate.main(prog_name="python -m workers.simulator")
