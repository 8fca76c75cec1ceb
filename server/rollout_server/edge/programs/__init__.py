"""Programs that the server runs for its rollouts, as processes of their own."""
