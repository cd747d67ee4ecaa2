"""What ranks say to each other without the fleet between them: hidden states, and the logs of instances.

Way in: `hub.PeerHub`, of which each rank has one.
"""
