"""The synchronous and the asynchronous HTTP API of trainers: routes, bodies and their conversion to the contract."""
