"""The processes of one machine: started, watched, told to stop."""
