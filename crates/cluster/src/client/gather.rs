//! Brings the bytes of many objects to this client.
//!
//! Several threads copy, each from whatever worker has the next object that is complete. So
//! processors copy at the same time, and a thread copies while another one asks.
//!
//! *Invariant:* a place in the result is filled once, with the bytes of its own object.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::bulk::{Fetcher, LARGE};
use super::session::{Session, Status};
use super::{ClientError, Remote};
use cuda_cluster_wire::tasks::{ObjectId, Product};

/// Most threads that copy. More would wait for the same memory.
const THREADS: usize = 4;

/// The bytes of all these objects, in order.
pub(super) fn gather(session: &Session, remotes: &[Remote]) -> Result<Vec<Vec<u8>>, ClientError> {
    let mut places: HashMap<ObjectId, Vec<usize>> = HashMap::with_capacity(remotes.len());
    for (at, remote) in remotes.iter().enumerate() {
        places.entry(remote.id()).or_default().push(at);
    }
    let stream = session.watch(places.keys().copied());
    let gathering = Gathering {
        session,
        stream,
        left: AtomicUsize::new(places.len()),
        failed: AtomicBool::new(false),
        came: Mutex::new(Ok(HashMap::with_capacity(places.len()))),
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        gathering.work(|| {
            for _ in 1..processors.min(THREADS).min(places.len()) {
                // Without another thread, this one does everything.
                let thread = std::thread::Builder::new().name("gather".to_owned());
                let _ = thread.spawn_scoped(scope, || gathering.work(|| ()));
            }
        });
    });
    session.unwatch(gathering.stream);
    let came = gathering.came.into_inner().unwrap_or_else(PoisonError::into_inner)?;
    let mut all = vec![Vec::new(); remotes.len()];
    for (object, bytes) in came {
        if let Some((last, others)) = places.get(&object).and_then(|places| places.split_last()) {
            for at in others {
                all[*at].clone_from(&bytes);
            }
            all[*last] = bytes;
        }
    }
    Ok(all)
}

struct Gathering<'a> {
    session: &'a Session,
    stream: u64,
    /// Objects that no thread has taken yet.
    left: AtomicUsize,
    failed: AtomicBool,
    came: Mutex<Result<HashMap<ObjectId, Vec<u8>>, ClientError>>,
}

impl Gathering<'_> {
    /// Takes objects until none are left. Calls `on_large` when the first large one comes.
    fn work(&self, on_large: impl FnOnce()) {
        let mut on_large = Some(on_large);
        let mut fetcher = Fetcher::new(self.session);
        let one_less = |left: usize| left.checked_sub(1);
        let order = Ordering::Relaxed;
        while !self.failed.load(order) && self.left.fetch_update(order, order, one_less).is_ok() {
            let next = self.session.ready_of(self.stream).map_or_else(
                || {
                    fetcher.close();
                    self.session.next_of(self.stream)
                },
                Ok,
            );
            let came = next.and_then(|object| {
                let bytes = match self.session.wait(object, None)? {
                    Status::Available(Product::Inline(bytes)) => bytes,
                    Status::Available(Product::Stored(size)) => {
                        if size >= LARGE as u64
                            && let Some(on_large) = on_large.take()
                        {
                            on_large();
                        }
                        fetcher.fetch(object)?
                    }
                    Status::Failed(error) => return Err(error.into()),
                    Status::Pending => return Err(ClientError::Gone),
                };
                Ok((object, bytes))
            });
            self.note(came);
        }
    }

    fn note(&self, came: Result<(ObjectId, Vec<u8>), ClientError>) {
        let mut all = self.came.lock().unwrap_or_else(PoisonError::into_inner);
        match (came, &mut *all) {
            (Ok((object, bytes)), Ok(all)) => {
                all.insert(object, bytes);
            }
            (Err(error), Ok(_)) => {
                self.failed.store(true, Ordering::Relaxed);
                *all = Err(error);
                // The other threads may wait for objects that take long.
                self.session.unwatch(self.stream);
            }
            (_, Err(_)) => {}
        }
    }
}
