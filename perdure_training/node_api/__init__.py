"""What the processes of a node share: the bodies that they exchange with the agent, the names in the run directory,
the files that ranks write, and the client of the agent.

Agent, launcher and training library import it from here, so that each of these has one definition. It needs the
standard library only, since it runs in users' processes.
"""
