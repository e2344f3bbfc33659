//! The laws of the stand-in for the CUDA driver, each in a process of its own.
//!
//! *Invariant:* an action that would kill or be refused on a real GPU has the same effect here.

#![allow(unsafe_code, clippy::print_stdout)]

use std::ffi::{c_int, c_uint, c_void};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use libloading::Library;

use crate::fake_machine::FakeMachine;

/// Says to a process that it is the child of a test.
const CHILD: &str = "CUDA_CLUSTER_TEST_OF_DRIVER";

/// How a process ended, and the machine that it saw.
struct Ended {
    status: ExitStatus,
    said: String,
    fake: FakeMachine,
    _folder: tempfile::TempDir,
}

/// Runs one test again as a process that sees a machine with a driver. `None` in that process.
fn in_a_process(test: &str, faults: &str) -> Option<Ended> {
    if std::env::var_os(CHILD).is_some() {
        return None;
    }
    let folder = tempfile::tempdir().expect("a directory");
    let machine = cuda_cluster::topology::builtin("rtx-4090-2").expect("built in");
    let machine = cuda_cluster::topology::parse(machine).expect("a machine");
    let fake = FakeMachine::write(&machine, folder.path()).expect("written");
    let fake = fake.with_driver(faults).expect("written");
    let mut command = Command::new(std::env::current_exe().expect("a test program"));
    command.args(["--exact", "--nocapture", &format!("driver::{test}")]);
    let output = command.envs(fake.environment()).env(CHILD, "1").output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    Some(Ended { status: output.status, said, fake, _folder: folder })
}

/// The driver's functions that these tests call.
struct Cuda(Library);

type Call1<A> = unsafe extern "C" fn(A) -> c_int;
type Call2<A, B> = unsafe extern "C" fn(A, B) -> c_int;
type Call3<A, B, C> = unsafe extern "C" fn(A, B, C) -> c_int;
type Call4<A, B, C, D> = unsafe extern "C" fn(A, B, C, D) -> c_int;

impl Cuda {
    fn open() -> Self {
        // SAFETY: the stand-in's initialisers have no preconditions.
        let cuda = Self(unsafe { Library::new("libcuda.so.1") }.expect("the stand-in"));
        // SAFETY: no flags are defined.
        assert_eq!(unsafe { (cuda.find::<Call1<c_uint>>("cuInit"))(0) }, 0);
        cuda
    }

    fn find<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the callers name functions with their types in `cuda.h`.
        *unsafe { self.0.get::<T>(name) }.expect(name)
    }

    /// Makes the context of the first GPU current.
    fn with_context(self) -> Self {
        let mut context = 0usize;
        // SAFETY: a place for the result.
        unsafe {
            let retain = self.find::<Call2<*mut usize, c_int>>("cuDevicePrimaryCtxRetain");
            assert_eq!(retain(&raw mut context, 0), 0);
            assert_eq!((self.find::<Call1<usize>>("cuCtxSetCurrent"))(context), 0);
        }
        self
    }

    fn allocate(&self, bytes: usize) -> Result<usize, c_int> {
        let mut address = 0;
        // SAFETY: a place for the result.
        let code = unsafe {
            (self.find::<Call2<*mut usize, usize>>("cuMemAlloc_v2"))(&raw mut address, bytes)
        };
        if code == 0 { Ok(address) } else { Err(code) }
    }

    fn free(&self, address: usize) -> c_int {
        // SAFETY: the driver checks the address.
        unsafe { (self.find::<Call1<usize>>("cuMemFree_v2"))(address) }
    }

    fn read(&self, address: usize, bytes: &mut [u8]) -> c_int {
        let copy = self.find::<Call3<*mut c_void, usize, usize>>("cuMemcpyDtoH_v2");
        // SAFETY: room for what is read; the driver checks the address.
        unsafe { copy(bytes.as_mut_ptr().cast(), address, bytes.len()) }
    }
}

#[test]
fn a_program_that_touches_device_memory_dies_of_it() {
    if let Some(Ended { status, said, .. }) =
        in_a_process("a_program_that_touches_device_memory_dies_of_it", "")
    {
        assert_eq!(status.signal(), Some(11), "{said}");
        assert!(said.contains("about to touch"), "{said}");
        return;
    }
    let cuda = Cuda::open().with_context();
    let address = cuda.allocate(4096).expect("memory");
    println!("about to touch");
    // SAFETY: none; this is what must kill the process.
    let byte = unsafe { std::ptr::with_exposed_provenance::<u8>(address).read_volatile() };
    println!("not dead, and read {byte}");
}

#[test]
fn what_a_process_left_and_was_refused_is_in_its_report() {
    let test = "what_a_process_left_and_was_refused_is_in_its_report";
    if let Some(Ended { status, said, fake, _folder }) = in_a_process(test, "poison small=1M") {
        assert!(status.success(), "{said}");
        let reports = fake.reports();
        let [report] = reports.as_slice() else { panic!("{reports:#?}") };
        assert_eq!(report["left"]["allocations"], serde_json::json!({"count": 1, "bytes": 5000}));
        assert_eq!(report["left"]["contexts"], 1);
        assert_eq!(report["refused"]["cuMemAlloc 201"], 1, "{report:#}");
        assert_eq!(report["refused"]["cuMemAlloc 2"], 1, "{report:#}");
        assert_eq!(report["refused"]["cuMemFree 1"], 1, "{report:#}");
        assert_eq!(report["moved"]["device to host"], 5000, "{report:#}");
        return;
    }
    let cuda = Cuda::open();
    assert_eq!(cuda.allocate(100), Err(201), "without a context");
    let cuda = cuda.with_context();
    assert_eq!(cuda.allocate(2 << 20), Err(2), "more than there is");
    let left = cuda.allocate(5000).expect("memory");
    let freed = cuda.allocate(5000).expect("memory");
    assert_eq!((cuda.free(freed), cuda.free(freed)), (0, 1), "freed twice");
    let mut bytes = vec![0; 5000];
    assert_eq!(cuda.read(left, &mut bytes), 0);
    assert!(bytes.iter().all(|byte| *byte == 0xa5), "fresh memory is poisoned");
    assert_eq!(cuda.read(left + 4000, &mut bytes), 1, "beyond the end");
}

#[test]
fn pinned_memory_is_read_only_when_the_stream_has_come_so_far() {
    let test = "pinned_memory_is_read_only_when_the_stream_has_come_so_far";
    if let Some(Ended { status, said, .. }) = in_a_process(test, "async") {
        assert!(status.success(), "{said}");
        return;
    }
    let cuda = Cuda::open().with_context();
    let (bytes, mut stream) = (1 << 20, 0usize);
    let device = cuda.allocate(bytes).expect("memory");
    let mut pinned = vec![1u8; bytes];
    let copies = 64;
    // SAFETY: places for the results; the memory lives until the stream is done.
    unsafe {
        let pin = cuda.find::<Call3<*mut u8, usize, c_uint>>("cuMemHostRegister_v2");
        assert_eq!(pin(pinned.as_mut_ptr(), bytes, 0), 0);
        let create = cuda.find::<Call2<*mut usize, c_uint>>("cuStreamCreate");
        assert_eq!(create(&raw mut stream, 1), 0);
        let copy = cuda.find::<Call4<usize, *const u8, usize, usize>>("cuMemcpyHtoDAsync_v2");
        for _ in 0..copies {
            assert_eq!(copy(device, pinned.as_ptr(), bytes, stream), 0);
        }
        // Too early: the last copies see it.
        pinned.fill(2);
        assert_eq!((cuda.find::<Call1<usize>>("cuStreamSynchronize"))(stream), 0);
    }
    let mut found = vec![0; bytes];
    assert_eq!(cuda.read(device, &mut found), 0);
    assert!(found.contains(&2), "the last copy was done after the call");
}

#[test]
fn a_gpu_that_has_faulted_says_so_to_every_call_but_not_to_the_next_process() {
    let test = "a_gpu_that_has_faulted_says_so_to_every_call_but_not_to_the_next_process";
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("faults");
    std::fs::write(&path, "0 719\n").expect("written");
    if let Some(Ended { status, said, .. }) =
        in_a_process(test, &format!("sticky={}", path.display()))
    {
        assert!(status.success(), "{said}");
        return;
    }
    let faults = std::env::var("CUDA_CLUSTER_FAKE_CUDA_FAULTS").expect("told");
    let path = faults.split_once("sticky=").expect("a path").1;
    let cuda = Cuda::open().with_context();
    let memory = cuda.allocate(100).expect("the fault is of another process");
    std::fs::write(path, "0 719\n1 214\n0 700\n").expect("written");
    assert_eq!(cuda.allocate(100), Err(700));
    assert_eq!(cuda.free(memory), 700);
    assert_eq!(cuda.read(memory, &mut [0; 10]), 700);
}
