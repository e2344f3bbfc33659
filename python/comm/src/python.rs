//! `cuda_cluster._comm`: what Python sees.
//!
//! Converts, and holds Python's buffers while their bytes are in use. Decides nothing.
//!
//! *Invariant:* a buffer of Python's is released only after its message is done or its connection
//! has ended, whatever Python does.

#![allow(unsafe_code)]

mod plane;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{
    PyBufferError, PyConnectionError, PyPermissionError, PyRuntimeError, PyValueError,
};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyMemoryView, PySlice};

use crate::completions::Completions;
use crate::connection::{self, Ending, Receipt, Submitted};
use crate::engine::{Engine, Route, Settings, tcp_addresses};
use crate::greeting::{LENGTH, PREAMBLE};
use crate::listener;
use crate::outbox::Frame;
use crate::peer::{self, Peer};
use cuda_cluster_data::memory::Block;

/// From this size on, in bytes, other threads of Python run while a message is handed over. Below,
/// getting the interpreter back could take longer than handing over.
const DETACHED: usize = 1 << 20;

/// Messages between the processes of a Dask cluster. See `cuda_cluster.comm`.
#[pymodule(gil_used = true)]
mod _comm {
    #[pymodule_export]
    use super::plane::{
        Transfer, address_for, fetch, fetched, has_context, memory, offer, open_plane, plane_key,
    };
    #[pymodule_export]
    use super::{
        Connection, Events, Held, Listener, Memory, bound_memory, connect, is_of_this_user,
        kept_memory, least_written, listen, preamble, prepare_memory, received, shared_memory,
    };
}

/// What has happened, for one event loop: it watches `fileno()` and calls `take()`.
#[pyclass(frozen, module = "cuda_cluster._comm")]
struct Events {
    completions: Arc<Completions>,
}

/// Memory of a message that has arrived. Returns to the pool when its last view is gone.
#[pyclass(frozen, module = "cuda_cluster._comm")]
struct Memory {
    block: Block,
}

/// The buffers of a message that is on its way.
#[pyclass(frozen, module = "cuda_cluster._comm")]
struct Held {
    connection: Arc<connection::Connection>,
    number: u64,
    #[expect(dead_code, reason = "held until the message is done")]
    buffers: Vec<PyUntypedBuffer>,
}

/// One end of a connection.
#[pyclass(frozen, module = "cuda_cluster._comm")]
struct Connection {
    connection: Arc<connection::Connection>,
    engine: &'static Engine,
}

/// A socket that accepts connections.
#[pyclass(frozen, module = "cuda_cluster._comm")]
struct Listener {
    listener: Arc<listener::Listener>,
    engine: &'static Engine,
}

fn raised(ending: Ending) -> PyErr {
    match &ending {
        Ending::Refused(_) => PyPermissionError::new_err(ending.to_string()),
        _ => PyConnectionError::new_err(ending.to_string()),
    }
}

fn settings(
    secret: Option<[u8; LENGTH]>,
    host: &str,
    tcp_timeout: f64,
    route: &str,
) -> PyResult<Settings> {
    let tcp_timeout = Duration::try_from_secs_f64(tcp_timeout);
    let tcp_timeout = tcp_timeout.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    let route = match route {
        "auto" => Route::Auto,
        "mapped" => Route::Mapped,
        "copied" => Route::Copied,
        "socket" => Route::Socket,
        other => {
            let text = format!(
                "distributed.comm.direct.route is {other:?}; hint: auto, mapped, copied or socket"
            );
            return Err(PyValueError::new_err(text));
        }
    };
    Ok(Settings { secret, tcp_timeout, route, ..Settings::new(host) })
}

/// Takes over a descriptor that Python has detached from its socket.
fn owned(descriptor: i32) -> PyResult<OwnedFd> {
    if descriptor < 0 {
        return Err(PyRuntimeError::new_err("the socket is closed"));
    }
    // SAFETY: the caller has detached it, so that nobody else closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Takes over a connected, non-blocking socket and begins to greet. `events` are told of
/// `Connection.id` when the greeting is over.
#[pyfunction]
#[pyo3(signature = (descriptor, events, *, secret, host, tcp_timeout, route))]
fn connect(
    descriptor: i32,
    events: &Events,
    secret: Option<[u8; LENGTH]>,
    host: &str,
    tcp_timeout: f64,
    route: &str,
) -> PyResult<Connection> {
    let socket = owned(descriptor)?;
    let engine = Engine::of_this_process()?;
    let settings = settings(secret, host, tcp_timeout, route)?;
    let connection = engine.connect(socket, settings, &events.completions);
    Ok(Connection { connection, engine })
}

/// Takes over a listening, non-blocking socket. `events` are told of `Listener.id` when connections
/// have been accepted.
#[pyfunction]
#[pyo3(signature = (descriptor, events, *, secret, tcp_timeout, route))]
fn listen(
    descriptor: i32,
    events: &Events,
    secret: Option<[u8; LENGTH]>,
    tcp_timeout: f64,
    route: &str,
) -> PyResult<Listener> {
    let socket = owned(descriptor)?;
    let engine = Engine::of_this_process()?;
    let settings = settings(secret, "", tcp_timeout, route)?;
    let listener = engine.listen(socket, settings, &events.completions);
    Ok(Listener { listener, engine })
}

/// Sets how many bytes of memory this process keeps for later messages, and how much memory it may have
/// in all before it keeps none (None for any).
#[pyfunction]
#[pyo3(signature = (keep, process=None))]
fn bound_memory(keep: usize, process: Option<usize>) {
    Engine::bound(keep, process.unwrap_or(usize::MAX));
}

/// Readies this process for its first large messages: memory of so many bytes, and their route.
#[pyfunction]
fn prepare_memory(bytes: usize) -> PyResult<()> {
    Engine::of_this_process()?.prepare(bytes);
    Ok(())
}

/// How each end of a connection begins, in all versions.
#[pyfunction]
fn preamble() -> &'static [u8] {
    &PREAMBLE
}

/// Whether a process of this user is at the other end of a Unix socket.
#[pyfunction]
fn is_of_this_user(descriptor: i32) -> PyResult<bool> {
    // SAFETY: the caller holds the socket during this call, which only asks the kernel about it.
    let socket = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let peer = peer::of(&socket).map_err(std::io::Error::from)?;
    Ok(matches!(peer, Peer::Own(_)))
}

/// How many bytes of memory this process keeps for later messages.
#[pyfunction]
fn kept_memory() -> PyResult<usize> {
    Ok(Engine::of_this_process()?.kept())
}

/// Bytes of frames that this process has received: copied, in mapped memory, over sockets.
#[pyfunction]
fn received() -> PyResult<[u64; 3]> {
    Ok(Engine::of_this_process()?.received())
}

/// From how many bytes on a message is written to mapped memory though it could be copied; 0 if never,
/// none before that was measured.
#[pyfunction]
fn least_written() -> PyResult<Option<usize>> {
    Ok(Engine::of_this_process()?.least().map(|least| least.unwrap_or(0)))
}

/// What of the memory of this process peers may write, and what of theirs is in its page tables, in
/// bytes.
#[pyfunction]
fn shared_memory() -> PyResult<(usize, usize)> {
    Ok(Engine::of_this_process()?.shared())
}

#[pymethods]
impl Events {
    #[new]
    fn new() -> PyResult<Self> {
        Ok(Self { completions: Arc::new(Completions::new()?) })
    }

    fn fileno(&self) -> i32 {
        self.completions.as_fd().as_raw_fd()
    }

    fn take(&self) -> Vec<u64> {
        self.completions.take()
    }
}

#[pymethods]
impl Memory {
    unsafe fn __getbuffer__(
        slf: &Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: std::ffi::c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no place for the view"));
        }
        let block = &slf.get().block;
        let len = isize::try_from(block.len())?;
        // SAFETY: the block is writable and lives as long as this object, to which the view refers.
        let done = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), block.start().as_ptr().cast(), len, 0, flags)
        };
        if done == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }

    fn __len__(&self) -> usize {
        self.block.len()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.connection.is_done_here(self.number) {
            self.connection.abort();
            self.connection.settle();
        }
    }
}

#[pymethods]
impl Held {
    /// Whether nothing uses them any more.
    #[getter]
    fn done(&self) -> bool {
        self.connection.is_done_here(self.number)
    }

    /// Whether the connection has ended before the peer had them.
    #[getter]
    fn lost(&self) -> bool {
        self.connection.is_lost(self.number)
    }
}

impl Connection {
    fn here(&self) -> PyResult<&connection::Connection> {
        if self.engine.is_alive_here() {
            return Ok(&self.connection);
        }
        let text = "this process is a fork of the one that has the connection; hint: start \
                    processes with the method 'spawn' or 'forkserver'";
        Err(PyConnectionError::new_err(text))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

#[pymethods]
impl Connection {
    /// The number of its events: this one for what arrives, the next one for what has been sent.
    #[getter]
    fn id(&self) -> u64 {
        self.connection.id()
    }

    /// The frames of the next message, or none: then there will be an event.
    fn receive<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        let receipt = self.here()?.receive().map_err(raised)?;
        receipt.map(|receipt| views(py, receipt)).transpose()
    }

    /// Sends a message of buffers, which must be contiguous. None if nothing uses them any more,
    /// otherwise an object that holds them: there will be an event.
    #[expect(clippy::needless_pass_by_value, reason = "extracted from a list")]
    fn send(&self, py: Python<'_>, frames: Vec<Bound<'_, PyAny>>) -> PyResult<Option<Held>> {
        let connection = self.here()?;
        let buffers: Vec<PyUntypedBuffer> =
            frames.iter().map(PyUntypedBuffer::get).collect::<PyResult<_>>()?;
        if buffers.iter().any(|buffer| !buffer.is_c_contiguous()) {
            return Err(PyBufferError::new_err("a frame is not contiguous"));
        }
        let place = |(buffer, object): (&PyUntypedBuffer, &Bound<'_, PyAny>)| {
            let (address, len) = (buffer.buf_ptr().expose_provenance(), buffer.len_bytes());
            Ok(Frame { address, len, apart: !is_bytes(object)? })
        };
        let frames: Vec<Frame> = buffers.iter().zip(&frames).map(place).collect::<PyResult<_>>()?;
        let inline: usize =
            if connection.waits() { 0 } else { frames.iter().map(|frame| frame.len).sum() };
        // SAFETY: the buffers keep their bytes readable. They are released when the message is done,
        // here or by `Held`.
        let submit = || unsafe { connection.submit(&frames) };
        let submitted = if inline < DETACHED { submit() } else { py.detach(submit) };
        match submitted.map_err(raised)? {
            Submitted::Done => Ok(None),
            Submitted::Pending(number) => {
                Ok(Some(Held { connection: Arc::clone(&self.connection), number, buffers }))
            }
        }
    }

    /// Whether all that was sent is with the peer; if not, there will be an event.
    #[getter]
    fn flushed(&self) -> PyResult<bool> {
        Ok(self.here()?.is_flushed())
    }

    /// Whether the greeting is over; if not, there will be an event.
    #[getter]
    fn open(&self) -> PyResult<bool> {
        self.here()?.is_open().map_err(raised)
    }

    /// Whether it has ended, though messages may still wait.
    #[getter]
    fn closed(&self) -> bool {
        self.here().map_or(true, connection::Connection::has_ended)
    }

    /// The host that the connector has connected to.
    #[getter]
    fn host(&self) -> PyResult<String> {
        Ok(self.here()?.host())
    }

    /// Why this process cannot copy from the peer's memory, if it tried.
    #[getter]
    fn refused(&self) -> PyResult<Option<String>> {
        Ok(self.here()?.barrier().map(peer::Barrier::why))
    }

    /// Whether this process can copy large frames of the peer, the peer those of this one, and each
    /// maps memory of the other.
    #[getter]
    fn routes(&self) -> PyResult<(bool, bool, bool)> {
        Ok(self.here()?.routes())
    }

    /// Hosts and ports of this end and of the peer, over TCP.
    #[getter]
    fn addresses(&self) -> PyResult<((String, u16), (String, u16))> {
        let (own, peer) = tcp_addresses(self.here()?)?;
        Ok(((own.ip().to_string(), own.port()), (peer.ip().to_string(), peer.port())))
    }

    /// Ends it at once.
    fn abort(&self) {
        self.connection.abort();
    }
}

#[pymethods]
impl Listener {
    /// The number of its event.
    #[getter]
    fn id(&self) -> u64 {
        self.listener.id()
    }

    /// Takes the connections that have been accepted.
    fn accept(&self) -> Vec<Connection> {
        let connections = self.listener.accept().into_iter();
        connections.map(|connection| Connection { connection, engine: self.engine }).collect()
    }

    /// Takes the hosts that were not let in for the first time, and why.
    fn refused(&self) -> Vec<(String, String)> {
        self.listener.refused()
    }

    /// Accepts no more.
    fn close(&self) {
        self.listener.close();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.listener.close();
    }
}

/// Whether a frame is (a view of) bytes, which are read when the message is: headers and pickles.
/// Other frames are the data of objects, which may live longer than each other.
fn is_bytes(frame: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(frame.is_instance_of::<PyBytes>()
        || frame.is_instance_of::<PyMemoryView>()
            && frame.getattr(intern!(frame.py(), "obj"))?.is_instance_of::<PyBytes>())
}

/// Views of the frames of a message.
fn views(py: Python<'_>, receipt: Receipt) -> PyResult<Bound<'_, PyList>> {
    let blocks = receipt.blocks.into_iter().map(|block| {
        let len = block.len();
        let memory = Bound::new(py, Memory { block })?;
        Ok((PyMemoryView::from(memory.as_any())?, len))
    });
    let blocks: Vec<(Bound<'_, PyMemoryView>, usize)> = blocks.collect::<PyResult<_>>()?;
    let frames = PyList::empty(py);
    for (block, start, len) in receipt.frames {
        let (view, whole) = &blocks[block];
        if (start, len) == (0, *whole) {
            frames.append(view)?;
        } else {
            let (start, end) = (isize::try_from(start)?, isize::try_from(start + len)?);
            frames.append(view.get_item(PySlice::new(py, start, end, 1))?)?;
        }
    }
    Ok(frames)
}
