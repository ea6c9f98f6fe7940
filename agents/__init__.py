"""Ready agents, imported as `agentrl.agents`."""
