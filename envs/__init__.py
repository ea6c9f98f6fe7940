"""Ready environments, imported as `agentrl.envs`."""
