//! What will be done on a machine, and why.
//!
//! Pure: a [`Plan`] is a function of a topology, a spec and the caller's environment. Starts
//! nothing; `cluster` hands the plan to `supervise`.
//!
//! *Invariant:* the same input gives the same plan, byte for byte. A process gets exactly the CPUs,
//! memory nodes, NICs and variables that its plan shows.

mod adapt;
mod advised;
mod assign;
mod beyond;
mod bootstrap;
mod context;
mod cpus;
mod decide;
mod difference;
mod engine;
mod error;
mod exposed;
mod form;
mod gpus;
mod groups;
mod held;
mod hosts;
mod libucp;
mod memory;
mod network;
mod nics;
mod options;
mod pinning;
mod rates;
mod settings;
mod shares;
mod sound;
mod starter;
mod subset;
mod text;
mod ucx;
mod unused;
mod variables;
mod workers;

pub use crate::spec::{
    EngineKind, MemoryPolicy, Origin, Placement, RestartWhen, SchedulerDeath, Unresponsive,
};
pub use adapt::{Here, adapt_to_here};
pub use context::{Advice, CallerEnvironment, InstalledUcx, Interface};
pub use decide::plan;
pub use difference::difference;
pub use engine::{
    CommandPlan, DaskName, DaskPlan, EnginePlan, HostPlan, NativePlan, ProgramPlan, TlsFiles,
};
pub use error::{PlanError, PlanTextError, Unsound};
pub use form::{
    Binding, Connection, LimitPlan, Machine, Plan, Program, Rejected, Requirements, RmmPlan,
    SchedulerPlan, Supervision, UcxPlan, VERSION, Why, WorkerGpu, WorkerPlan,
};
pub use gpus::VISIBLE;
pub use held::worker_of_gpu;
pub use hosts::{MEMBER, SSH_OPTIONS};
pub use libucp::{LIBRARY_VARIABLE, libucp_paths};
pub use memory::{HOST_FILL_PERCENT, KILL_PERCENT, TERMINATE_VARIABLE, machine_bytes};
pub use settings::settings;
pub use starter::starter;
pub use text::TEXT_LIMIT;
pub use ucx::{NEEDS_CACHE_SINCE, without_cache};
pub use variables::{NET_DEVICES, TLS};
pub use workers::ORDER;
