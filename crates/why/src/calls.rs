//! What a line of a Python program says of the wait that it is in.
//!
//! *Invariant:* a name decides nothing alone: it tells ranks apart that wait anyway.

use crate::evidence::{End, Frame, Thread, Waits};

/// What all ranks have to call together, as the libraries name it: `torch.distributed`, mpi4py
/// (`allreduce` for objects, `Allreduce` for buffers), JAX, Horovod, RapidsMPF.
const COLLECTIVES: [&str; 34] = [
    "all_reduce",
    "allreduce",
    "Allreduce",
    "barrier",
    "Barrier",
    "monitored_barrier",
    "bcast",
    "Bcast",
    "broadcast",
    "broadcast_object_list",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "allgather",
    "Allgather",
    "Allgatherv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "Reduce_scatter",
    "gather",
    "Gather",
    "scatter",
    "Scatter",
    "all_to_all",
    "all_to_all_single",
    "alltoall",
    "Alltoall",
    "Alltoallv",
    "reduce",
    "Reduce",
    "init_process_group",
    "sync_global_devices",
    "Split",
    "Ibarrier",
];

/// The same in programs without Python, as MPI, NCCL and NVSHMEM name it, without `MPI_`, `nccl`
/// and `nvshmem_`.
const NATIVE_COLLECTIVES: [(&str, &[&str]); 3] = [
    (
        "MPI_",
        &[
            "Allgather",
            "Allgatherv",
            "Allreduce",
            "Alltoall",
            "Alltoallv",
            "Barrier",
            "Bcast",
            "Comm_create",
            "Comm_dup",
            "Comm_free",
            "Comm_split",
            "Comm_split_type",
            "Exscan",
            "File_open",
            "File_write_all",
            "Finalize",
            "Gather",
            "Gatherv",
            "Init",
            "Init_thread",
            "Reduce",
            "Reduce_scatter",
            "Reduce_scatter_block",
            "Scan",
            "Scatter",
            "Scatterv",
            "Win_create",
            "Win_fence",
        ],
    ),
    ("nccl", &["CommFinalize", "CommInitRank", "CommInitRankConfig", "CommSplit", "GroupEnd"]),
    ("nvshmem_", &["barrier_all", "finalize", "init", "init_thread", "sync_all"]),
];

/// MPI's waits for a message, without `MPI_`; mpi4py names them so, too.
const MESSAGES: [&str; 12] = [
    "Mprobe", "Probe", "Recv", "Rsend", "Send", "Sendrecv", "Ssend", "Wait", "Waitall", "Waitany",
    "Waitsome", "Bsend",
];

/// MPI's other waits for one rank's part, mostly of one-sided communication, without `MPI_`.
const PARTS: [&str; 10] = [
    "Buffer_detach",
    "Win_complete",
    "Win_flush",
    "Win_flush_all",
    "Win_lock",
    "Win_lock_all",
    "Win_start",
    "Win_unlock",
    "Win_unlock_all",
    "Win_wait",
];

/// Frames that are looked at, from the innermost.
const DEPTH: usize = 10;

/// The collective operation that a thread is in, and the line of the program that called it.
pub(crate) fn collective(thread: &Thread) -> Option<(String, Option<&Frame>)> {
    for (at, frame) in thread.frames.iter().take(DEPTH).enumerate() {
        let name = name_of(frame);
        if COLLECTIVES.contains(&name) {
            return Some((name.to_owned(), program(&thread.frames[at + 1..])));
        }
    }
    // An extension in C has no frame of its own.
    let leaf = thread.frames.first()?;
    let code = leaf.code.as_deref()?;
    let called = |name: &&&str| code.contains(&format!(".{name}("));
    let name = COLLECTIVES.iter().filter(called).max_by_key(|name| name.len())?;
    Some(((*name).to_owned(), program(&thread.frames)))
}

/// The wait for a message that a line of Python is in, of a library that asks again and again.
pub(crate) fn message(thread: &Thread) -> Option<&'static str> {
    // Those for objects, and mpi4py's names of the other waits.
    const CALLS: [&str; 17] = [
        "Complete",
        "Detach_buffer",
        "Flush",
        "Flush_all",
        "Lock",
        "Lock_all",
        "Start",
        "Unlock",
        "Unlock_all",
        "probe",
        "recv",
        "send",
        "sendrecv",
        "ssend",
        "wait",
        "waitall",
        "waitany",
    ];
    let code = thread.frames.first()?.code.as_deref()?;
    let mut calls = MESSAGES.into_iter().chain(CALLS);
    calls.find(|name| code.contains(&format!(".{name}(")))
}

/// The wait for a message of another rank that a thread is in, by PyTorch's function.
pub(crate) fn torch_message(thread: &Thread) -> Option<&str> {
    const CALLS: [&str; 5] =
        ["batch_isend_irecv", "recv", "recv_object_list", "send", "send_object_list"];
    let frames = thread.frames.iter().take(DEPTH);
    let mut found =
        frames.filter(|one| one.file.ends_with("torch/distributed/distributed_c10d.py"));
    found.find_map(|one| CALLS.into_iter().find(|name| name_of(one) == *name))
}

/// What a thread of native code is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Native {
    /// An operation that all ranks have to call.
    Collective(String),
    /// A wait for a message.
    Message(String),
}

/// The outermost operation of a library that a thread of native code is in.
pub(crate) fn native(thread: &Thread) -> Option<Native> {
    thread.functions.iter().rev().find_map(|function| {
        // Profilers replace `MPI_X` and call `PMPI_X`; Fortran calls `mpi_x_`.
        let name = function.name.strip_prefix('P').unwrap_or(&function.name);
        let fortran = name.strip_prefix("mpi_").and_then(|name| name.strip_suffix('_'));
        let is = |one: &str, prefix: &str| match fortran {
            Some(name) => prefix == "MPI_" && one.eq_ignore_ascii_case(name),
            None => name.strip_prefix(prefix) == Some(one),
        };
        let called = |prefix: &str, names: &[&str]| {
            let found = names.iter().find(|one| is(one, prefix))?;
            Some(format!("{prefix}{found}"))
        };
        let together = NATIVE_COLLECTIVES.iter();
        let together = together.filter_map(|(prefix, names)| called(prefix, names)).next();
        let message = || called("MPI_", &MESSAGES).or_else(|| called("MPI_", &PARTS));
        together.map(Native::Collective).or_else(|| message().map(Native::Message))
    })
}

/// Where a thread is: the innermost line of the program itself, or the innermost function of it.
pub(crate) fn place(thread: &Thread) -> Option<String> {
    let line = program(&thread.frames).map(Frame::place);
    line.or_else(|| {
        // Not a library's.
        let own = thread.functions.iter().find(|one| !one.module.contains(".so"));
        own.map(|function| format!("{} in {}", function.module, function.name))
    })
}

/// The innermost frame of the program itself: neither Python's library nor an installed package.
pub(crate) fn program(frames: &[Frame]) -> Option<&Frame> {
    // Libraries make functions from text, and `python -c` has nothing else.
    let written = |frame: &&Frame| is_own(frame) && frame.file != "<string>";
    let own = |frame: &&Frame| is_own(frame);
    frames.iter().find(written).or_else(|| frames.iter().find(own)).or(frames.first())
}

/// Whether a frame is of the program itself.
pub(crate) fn is_own(frame: &Frame) -> bool {
    let file = &frame.file;
    !(file.contains("/site-packages/")
        || file.contains("/dist-packages/")
        || file.contains("/lib/python3")
        || file.starts_with("<frozen "))
}

/// The name of a function: Python 3.11 says `World.all_reduce`, earlier ones `all_reduce`.
fn name_of(frame: &Frame) -> &str {
    frame.function.rsplit('.').next().unwrap_or_default()
}

/// Where the work items of pools are run: Python's own, and the copy in Dask's `distributed`.
const POOLS: [&str; 2] = ["concurrent/futures/thread.py", "_concurrent_futures_thread.py"];

/// Whether a thread of a pool is in a task: Dask's workers run theirs so, and `asyncio.to_thread`.
pub(crate) fn runs_a_task(thread: &Thread) -> bool {
    let run = |frame: &Frame| {
        let name = frame.function.rsplit('.').next();
        name == Some("run") && POOLS.iter().any(|file| frame.file.ends_with(file))
    };
    thread.frames.iter().any(run)
}

/// What a thread asks the scheduler of its Dask cluster for, as `distributed` names it, and whether
/// that is the result of another task: it waits in `distributed.utils.sync`, which wakes every ten
/// seconds and goes on waiting.
pub(crate) fn asks_dask(thread: &Thread) -> Option<(String, bool)> {
    let is_sync =
        |frame: &Frame| frame.file.ends_with("distributed/utils.py") && name_of(frame) == "sync";
    let at = thread.frames.iter().position(is_sync)?;
    let library = |frame: &&Frame| frame.file.contains("/distributed/");
    let asked = thread.frames[at..].iter().take_while(library);
    // `with Lock()` acquires it.
    let asked = asked.filter(|frame| !name_of(frame).starts_with("__")).last()?;
    let result = ["result", "gather"].contains(&name_of(asked));
    Some((asked.function.clone(), result && asked.file.ends_with("/client.py")))
}

/// Whether a thread waits for a result of a pool of processes (`multiprocessing.pool`).
pub(crate) fn wants_a_result(thread: &Thread) -> bool {
    let mut frames = thread.frames.iter().filter(|frame| is_pool(frame));
    frames.any(|frame| ["wait", "next"].contains(&name_of(frame)))
}

/// Whether a thread is the main one of a pool's process, and if so, whether it waits for a task.
pub(crate) fn pool_worker(thread: &Thread) -> Option<bool> {
    let at = thread.frames.iter().position(|frame| is_pool(frame) && name_of(frame) == "worker")?;
    let inner = at.checked_sub(1).and_then(|at| thread.frames.get(at));
    Some(inner.is_some_and(|one| {
        one.file.ends_with("multiprocessing/queues.py") && name_of(one) == "get"
    }))
}

/// Whether a thread takes a pool's results from its processes.
pub(crate) fn takes_results(thread: &Thread) -> bool {
    thread.frames.iter().any(|one| is_pool(one) && name_of(one) == "_handle_results")
}

/// Whether a thread hands out a pool's tasks, and is not waiting for some.
pub(crate) fn hands_out(thread: &Thread) -> bool {
    let at = thread.frames.iter().position(|one| is_pool(one) && name_of(one) == "_handle_tasks");
    at.is_some_and(|at| at > 0)
}

fn is_pool(frame: &Frame) -> bool {
    frame.file.ends_with("multiprocessing/pool.py")
}

/// Whether a thread asks a database, by a method of Python's interface of them (PEP 249).
pub(crate) fn asks_a_database(thread: &Thread) -> bool {
    const CALLS: [&str; 5] = ["commit", "execute", "executemany", "executescript", "rollback"];
    let code = thread.frames.first().and_then(|frame| frame.code.as_deref());
    code.is_some_and(|code| CALLS.iter().any(|name| code.contains(&format!(".{name}("))))
}

/// Whether a thread of a pool of threads waits for a task.
pub(crate) fn has_no_task(thread: &Thread) -> bool {
    thread.frames.first().is_some_and(|frame| name_of(frame) == "_worker")
}

/// What a thread wants that waits for a lock, by the function of Python's library that waits.
pub(crate) fn wanted(thread: &Thread) -> &'static str {
    const WANTED: [(&str, &str, &str); 8] = [
        ("/queue.py", "get", "an entry of a queue"),
        ("/queue.py", "put", "room in a queue"),
        ("/queue.py", "join", "the end of a queue's tasks"),
        ("/threading.py", "join", "the end of a thread"),
        ("/threading.py", "acquire", "a semaphore"),
        ("/threading.py", "wait", "an event or a condition"),
        ("futures/_base.py", "result", "a future"),
        ("importlib._bootstrap>", "_find_and_load", "an import's lock"),
    ];
    // The outermost one says the most: a queue waits for a condition.
    let frames = thread.frames.iter().take_while(|frame| {
        frame.file.contains("/lib/python3") || frame.file.starts_with("<frozen ")
    });
    let found = frames.filter_map(|frame| {
        let is = |(file, name, _): &&(&str, &str, &str)| {
            frame.file.ends_with(file) && name_of(frame) == *name
        };
        WANTED.iter().find(is).map(|(.., what)| *what)
    });
    found.last().unwrap_or("a lock")
}

/// Whether a thread is in the wait of an event loop of Python, or about to be.
pub(crate) fn waits_for_events(thread: &Thread) -> bool {
    thread.frames.first().is_some_and(|frame| frame.file.ends_with("/selectors.py"))
        && thread.frames.iter().any(|frame| frame.function.ends_with("run_forever"))
}

/// The time limit of a wait for something, if there is one: how much of it is left, if that is
/// known.
pub(crate) fn limit(thread: &Thread) -> Option<Option<u64>> {
    let call = thread.call.as_ref()?;
    let is_timer = |end: &End| *end == End::Timer;
    let timed = match &call.waits {
        Waits::Lock { timed, .. } => *timed,
        Waits::Any { timed, ends } => *timed || ends.iter().any(is_timer),
        Waits::Descriptor { end, .. } => is_timer(end),
        _ => false,
    };
    timed.then_some(call.left_ms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evidence::Function;

    fn frame(function: &str, file: &str, code: &str) -> Frame {
        Frame { function: function.into(), file: file.into(), line: 3, code: Some(code.into()) }
    }

    #[test]
    fn an_operation_of_native_code_is_the_outermost_one() {
        let function = |(name, module): (&str, &str)| Function {
            name: name.to_owned(),
            module: module.to_owned(),
        };
        let thread = |functions: &[(&str, &str)]| Thread {
            functions: functions.iter().copied().map(function).collect(),
            ..Thread::default()
        };
        let mpi = "libmpi.so.12";
        let split = [("PMPI_Allgather", mpi), ("PMPI_Comm_split", mpi), ("main", "solver")];
        let split = thread(&split);
        assert_eq!(native(&split), Some(Native::Collective("MPI_Comm_split".to_owned())));
        assert_eq!(place(&split), Some("solver in main".to_owned()));
        let fortran = thread(&[("MPIR_Barrier", mpi), ("mpi_barrier_", mpi), ("MAIN__", "ocean")]);
        assert_eq!(native(&fortran), Some(Native::Collective("MPI_Barrier".to_owned())));
        let waits = thread(&[("poll", "libc.so.6"), ("MPI_Recv", mpi), ("main", "solver")]);
        assert_eq!(native(&waits), Some(Native::Message("MPI_Recv".to_owned())));
        let other = thread(&[("PARTY", "solver"), ("MPI_Initialized", mpi)]);
        assert_eq!(native(&other), None);
    }

    #[test]
    fn a_collective_is_known_by_its_function_or_by_the_line_that_calls_c() {
        let wait = frame("wait", "/x/site-packages/torch/distributed/c10d.py", "work.wait()");
        let reduce =
            frame("Group.all_reduce", "/x/site-packages/torch/distributed/c10d.py", "return f()");
        let step = frame("step", "/home/me/train.py", "dist.all_reduce(x)");
        let thread = Thread { frames: vec![wait, reduce, step.clone()], ..Thread::default() };
        assert_eq!(collective(&thread), Some(("all_reduce".to_owned(), Some(&step))));
        let leaf = frame("main", "/home/me/solve.py", "comm.Allreduce(a, b)");
        let thread = Thread { frames: vec![leaf.clone()], ..Thread::default() };
        assert_eq!(collective(&thread), Some(("Allreduce".to_owned(), Some(&leaf))));
        let other = frame("main", "/home/me/solve.py", "functools.reducer(a)");
        assert_eq!(collective(&Thread { frames: vec![other], ..Thread::default() }), None);
    }
}
