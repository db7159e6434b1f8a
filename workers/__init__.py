"""The worker side: worker groups, sinks, the simulator."""
