//! The `cuda-cluster` command. See [`cuda_cluster::cli`].

fn main() -> std::process::ExitCode {
    cuda_cluster::cli::main()
}
