"""A pytest plugin for distributed's own tests, run over direct://: which of them cannot pass, and why.

Whatever else fails is a fault (`scripts/distributed-tests.sh`).
"""

import pytest

TCP = "looks into the class or the socket of Dask's TCP"
TOLD = "direct:// says in `extra_info` how messages travel; TCP says nothing"
JOINED = "TCP joins the header with a small array; direct:// gives every array memory of its own"
SCHEME = "the address of something else than the test's cluster: it was rewritten, too"
HOST = "distributed tells listeners the host that reaches the scheduler if they are TCP's or TLS's"
IPV6 = "fails over TCP, too: get_ipv6 is deprecated"
LOOP = "an event loop that has had a connection keeps one eventfd until it ends"
ROOT = "fails over TCP, too, for root"

EXPECTED = {
    "test_comms.py": {
        "test_tcp_specific": TOLD,
        "test_default_client_server_ipv6": IPV6,
        "test_tcp_client_server_ipv6": IPV6,
        "test_comm_closed_on_write_error": TCP,
        "test_stop_listener_during_handle_stream": TCP,
        "test_share_buffer_with_header": JOINED,
        "test_get_stream_address_raises_if_closed": TCP,
    },
    "test_core.py": {
        "test_server_listen": IPV6,
    },
    "test_worker.py": {
        "test_service_hosts_match_worker": HOST,
        "test_worker_listens_on_same_interface_by_default": HOST,
        "test_bad_local_directory": ROOT,
    },
    "test_client.py": {
        "test_unrunnable_task_runs": HOST,
        "test_file_descriptors_dont_leak": LOOP,
    },
    "test_scheduler.py": {"test_multiple_listeners": SCHEME},
}


def pytest_collection_modifyitems(items):
    for item in items:
        name = item.name.partition("[")[0]
        reason = EXPECTED.get(item.path.name, {}).get(name)
        if reason is not None:
            # Of several parameters, some may pass.
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
