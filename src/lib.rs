//! Brings up one worker process per GPU on one machine: each bound to the CPUs, memory and NIC near
//! its GPU, connected to the others over UCX, and supervised.
//!
//! Looking, deciding and acting are three steps, and what passes between them are plain values with
//! a text form: a [`Topology`](topology::Topology) says what the machine is, a
//! [`ClusterSpec`](spec::ClusterSpec) what is asked for, a [`Plan`](plan::Plan) what will be done
//! and why.
//!
//! # Launch a cluster
//!
//! The processes of a cluster are this program again, so its `main` begins with
//! [`cluster::dispatch`]. [`Builder::plan`](cluster::Builder::plan) looks at this machine and
//! decides; [`launch`](cluster::Builder::launch_blocking) does that and acts. When it returns,
//! every worker is READY; when the program ends, however it ends, so does the cluster.
//!
//! ```no_run
//! use cuda_cluster::cluster::{self, Cluster, LaunchFailure};
//!
//! fn main() -> std::process::ExitCode {
//!     if let Some(code) = cluster::dispatch() {
//!         return code; // this process is one of the cluster's
//!     }
//!     match work() {
//!         Ok(()) => std::process::ExitCode::SUCCESS,
//!         Err(error) => {
//!             eprintln!("error: {error}");
//!             if let Some(hint) = error.hint() {
//!                 eprintln!("hint: {hint}");
//!             }
//!             std::process::ExitCode::FAILURE
//!         }
//!     }
//! }
//!
//! fn work() -> Result<(), LaunchFailure> {
//!     let wanted = Cluster::builder().workers(4).enable_nvlink();
//!     for worker in wanted.plan()?.workers {
//!         println!("{} on CPUs {:?}: {:?}", worker.name, worker.binding.cpus, worker.why);
//!     }
//!     let cluster = wanted.launch_blocking()?;
//!     // `cluster.client()` submits tasks to the workers.
//!     cluster.stop();
//!     Ok(())
//! }
//! ```
//!
//! [`cluster::Builder::set`] and [`spec`](cluster::Builder::spec) take everything else that can be
//! asked for, and [`cluster::Builder::launch`] is for programs with an event loop (tokio):
//!
//! ```no_run
//! # async fn example() -> Result<(), cuda_cluster::cluster::LaunchFailure> {
//! use cuda_cluster::cluster::Cluster;
//!
//! let wanted = Cluster::builder().workers(2).enable_nvlink().set("memory.limit", "16GB");
//! let cluster = wanted.launch().await?;
//! for worker in &cluster.plan().workers {
//!     println!("{} on CPUs {:?}", worker.name, worker.binding.cpus);
//! }
//! cluster.stop().await;
//! # Ok(())
//! # }
//! ```
//!
//! # Guides
//!
//! - [A service that owns a cluster](guide::service)
//! - [Plan for a captured machine](guide::planning)
//! - [Functions, objects, failures](guide::tasks)
//! - [An async program](guide::asynchronous)
//!
//! Their programs are in `examples/`, and run without a GPU, on a simulated machine.
//!
//! # Plan for another machine
//!
//! A captured machine (`cuda-cluster topo -o yaml`, `nvidia-smi topo -m`, NCCL's or hwloc's XML) or
//! one of the [built-in ones](topology::builtin) is planned for anywhere, without a GPU:
//!
//! ```
//! use cuda_cluster::plan::{CallerEnvironment, plan};
//! use cuda_cluster::spec::{self, Request};
//! use cuda_cluster::topology;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let text = topology::builtin("dgx-h100").ok_or("a machine that is built in")?;
//! let machine = topology::parse(text)?;
//! let asked = spec::parse("version: 1\nworkers: 2\nucx: {nvlink: true}\n", "cluster.yaml")?;
//! let plan = plan(&machine, &Request::of(asked)?, &CallerEnvironment::default())?;
//! assert_eq!(plan.workers[1].name, "gpu1");
//! assert!(plan.workers[1].env["CUDA_VISIBLE_DEVICES"].starts_with("GPU-1f93209b-"));
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! All are on by default. Without any (`default-features = false`) there are topologies, specs and
//! plans, and some 40 crates to build instead of 190.
//!
//! - `probe`: what this machine has
//! - `launch`: clusters of the engines `dask` and `command`; module [`cluster`]
//! - `native`: the native engine; the one feature for which UCX is compiled, for its types
//! - `cli`: the program
//!
//! # What is stable
//!
//! The modules below, and the JSON and YAML forms of topologies, specs and plans: keys are added,
//! never renamed. The crate's other modules are parts of its own command line and tests, and change
//! without notice.

#[cfg(feature = "launch")]
#[doc(inline)]
pub use cuda_cluster_cluster as cluster;
#[doc(inline)]
pub use cuda_cluster_model::{cpuset, ids, plan, preflight, spec, text, topology, units};
pub mod guide;

// For the binary and the tests of this package alone.
#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod cli;
#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod dashboard;
#[cfg(feature = "probe")]
#[doc(hidden)]
pub use cuda_cluster_machine::{os, probe};
#[cfg(feature = "cli")]
#[doc(hidden)]
pub use cuda_cluster_model::predict;
#[cfg(feature = "native")]
#[doc(hidden)]
pub use {
    cuda_cluster_data::{cuda, ucx},
    cuda_cluster_native as native,
};
#[cfg(feature = "launch")]
#[doc(hidden)]
pub use {cuda_cluster_supervise as supervise, cuda_cluster_wire as wire};
