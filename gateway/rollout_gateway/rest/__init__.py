"""The plain API's forms of the contract: rollouts, events and errors as JSON, requests as protos."""
