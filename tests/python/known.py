"""What a scheduler knows, asked directly."""


def workers_of(client):
    """Address to what the scheduler knows about a worker.

    `Client.scheduler_info` returns what was stored last, and every two seconds the client stores
    an answer without workers (`Client._update_scheduler_info`, distributed 2026.7).
    """
    return client.sync(client.scheduler.identity)["workers"]
