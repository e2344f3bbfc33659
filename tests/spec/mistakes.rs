//! Specs with mistakes that people make: each error names the file, the position, the key, and what
//! to do.

use cuda_cluster::spec;

/// The error of a wrong spec as the command line prints it.
fn error(text: &str) -> String {
    match spec::parse(text, "cluster.yaml") {
        Ok(spec) => panic!("this was accepted: {spec:?}"),
        Err(error) => {
            let hint = error.hint().map_or_else(String::new, |hint| format!("hint: {hint}\n"));
            format!("{}\n---\nerror: {error}\n{hint}", text.trim_end())
        }
    }
}

macro_rules! wrong {
    ($($name:ident: $text:literal,)*) => {
        $(
            #[test]
            fn $name() {
                insta::assert_snapshot!(error($text));
            }
        )*
    };
}

wrong! {
    a_slip_in_a_key: "version: 1\nucx:\n  nvlink: true\n  net_device: auto\n",
    a_slip_in_a_section: "version: 1\nUCX:\n  nvlink: true\n",
    a_key_that_resembles_nothing: "version: 1\nkubernetes: true\n",
    a_word_that_is_no_choice: "version: 1\nengine: dsak\n",
    a_text_where_a_switch_belongs: "version: 1\nucx:\n  infiniband: maybe\n",
    a_number_that_is_none: "version: 1\nthreads: many\n",
    a_negative_number: "version: 1\nthreads: -2\n",
    a_size_without_sense: "version: 1\nrmm:\n  pool_size: 12 parsecs\n",
    a_fraction_above_the_whole: "version: 1\ndevice:\n  memory_limit: 1.5\n",
    a_list_where_a_section_belongs: "version: 1\nscheduler: [tcp, 8786]\n",
    a_range_that_runs_backwards: "version: 1\ngpus: 0-3,7-5\n",
    a_gpu_that_is_no_name: "version: 1\ngpus:\n  - 0\n  - second\n",
    a_template_with_an_unknown_number: "version: 1\nucx:\n  net_devices: mlx5_{cpu//2}:1\n",
    a_slip_in_a_network_word: "version: 1\nucx:\n  net_devices: strip\n",
    a_port_beyond_the_last: "version: 1\nscheduler:\n  port: 8786:88000\n",
    a_span_without_unit: "version: 1\nsupervision:\n  grace: 5 fortnights\n",
    no_version: "name: demo\nengine: dask\n",
    a_version_of_tomorrow: "version: 2\nname: demo\n",
    a_brace_that_is_not_closed: "version: 1\nucx: {nvlink: true\nname: demo\n",
    a_tab_for_indentation: "version: 1\nucx:\n\tnvlink: true\n",
    a_key_twice: "version: 1\nname: a\nname: b\n",
    a_variable_twice: "version: 1\nucx:\n  env:\n    UCX_TLS: rc\n    UCX_TLS: tcp\n",
    a_name_that_leaves_its_directory: "version: 1\nname: ../etc\n",
    managed_memory_with_nvlink:
        "version: 1\nucx:\n  nvlink: true\nrmm:\n  pool_size: 0.5\n  managed: true\n",
    the_asynchronous_allocator_with_managed_memory:
        "version: 1\nrmm:\n  async: true\n  managed: true\n",
    a_release_threshold_without_the_asynchronous_allocator:
        "version: 1\nrmm:\n  release_threshold: 10GB\n",
    a_pool_larger_than_its_maximum:
        "version: 1\nrmm:\n  pool_size: 40GB\n  maximum_pool_size: 30GB\n",
    tls_with_ucx:
        "version: 1\nengine: dask\nucx: {infiniband: true}\ntls: {ca_file: ca, cert: c, key: k}\n",
    tls_with_a_file_missing: "version: 1\nengine: dask\ntls:\n  cert: cert.pem\n",
    tcp_as_protocol_with_infiniband:
        "version: 1\nengine: dask\ndask:\n  protocol: tcp\nucx:\n  infiniband: true\n",
    tcp_as_protocol_with_a_libucp:
        "version: 1\nengine: dask\ndask:\n  protocol: tcp\nucx:\n  library: auto\n",
    direct_as_protocol_with_rdmacm:
        "version: 1\nengine: dask\ndask:\n  protocol: direct\nucx:\n  infiniband: true\n  rdmacm: true\n",
    direct_as_protocol_with_tls:
        "version: 1\nengine: dask\ndask: {protocol: direct}\ntls: {ca_file: ca, cert: c, key: k}\n",
    too_few_ports: "version: 1\nworkers: 8\nworker:\n  ports: 9000:9003\n",
    one_listen_address_for_several_workers:
        "version: 1\ngpus: 0-3\nworker:\n  listen_address: 10.0.0.1\n",
    threads_that_are_none: "version: 1\nthreads: 0\n",
    nothing_to_run: "version: 1\ngpus: none\n",
    a_gpu_twice: "version: 1\ngpus: [0, 1, 0]\n",
    a_number_given_in_two_ways: "version: 1\nworkers: 4\ngpus: {count: 2}\n",
    a_slip_inside_of_a_choice: "version: 1\ngpus:\n  count: 4\n  chose: best-connected\n",
    cores_for_the_scheduler_without_a_split: "version: 1\nscheduler_cores: 2\n",
    an_override_for_nobody: "version: 1\noverrides:\n  - match: {}\n    threads: 2\n",
    an_override_with_a_slip: "version: 1\noverrides:\n  - match: {gpu: 0}\n    thread: 2\n",
    a_variable_that_the_plan_decides_on:
        "version: 1\nworker:\n  env:\n    CUDA_VISIBLE_DEVICES: \"0\"\n",
    a_ucx_variable_in_the_wrong_place: "version: 1\nworker:\n  env:\n    UCX_TLS: all\n",
    two_ways_to_say_where_to_listen:
        "version: 1\nscheduler:\n  host: 127.0.0.1\n  interface: eth0\n",
    a_number_of_26_digits: "version: 1\nworkers: 12345678901234567890123456\n",
    an_address_that_is_none: "version: 1\nscheduler:\n  host: 999.1.1.1\n",
    a_limit_without_its_unit: "version: 1\nmemory:\n  limit: 1\n",
    an_option_for_an_address: "version: 1\nengine: dask\ndask:\n  join: --scheduler-file\n",
}

#[test]
fn an_empty_file_is_a_spec_without_a_version() {
    for text in ["", "# nothing\n", "---\n"] {
        assert!(error(text).contains("'version' is missing"), "{text:?}: {}", error(text));
    }
}

#[test]
fn a_byte_order_mark_is_no_part_of_the_spec() {
    let spec = spec::parse("\u{feff}version: 1\nname: marked\n", "cluster.yaml").expect("right");
    assert_eq!(spec.name.expect("a name").as_str(), "marked");
    let wrong = error("\u{feff}version: 1\nthreads: many\n");
    assert!(wrong.contains("cluster.yaml:2:1: threads: "), "{wrong}");
}

#[test]
fn a_number_of_26_digits_is_as_good_as_a_text_for_a_variable() {
    let text = "version: 1\nworker:\n  env: {SEED: 12345678901234567890123456}\n";
    let env = spec::parse(text, "cluster.yaml").expect("right").worker.env.expect("set");
    assert_eq!(env["SEED"], "12345678901234567890123456");
}

#[test]
fn a_number_is_as_good_as_a_text_for_a_variable() {
    let spec = spec::parse("version: 1\nucx:\n  env: {UCX_MAX_RNDV_RAILS: 2}\n", "cluster.yaml");
    let env = spec.expect("right").ucx.env.expect("set");
    assert_eq!(env.get("UCX_MAX_RNDV_RAILS").map(String::as_str), Some("2"));
}

#[test]
fn an_empty_section_is_a_section_with_nothing_in_it() {
    let spec = spec::parse("version: 1\nucx:\n  # nvlink: true\nrmm:\n", "cluster.yaml");
    assert_eq!(spec.map(|spec| spec.ucx), Ok(spec::UcxSpec::default()));
}

#[test]
fn words_of_dasks_configuration_need_no_quotes() {
    let text = "version: 1\ndask: {config: {a: false, b: 1.10, c: \"true\", d: True}}\n";
    let config = spec::parse(text, "spec.yaml").expect("a spec").dask.config.expect("a section");
    let values: Vec<&str> = config.values().map(String::as_str).collect();
    assert_eq!(values, ["false", "1.10", "true", "True"]);
    let keys = serde_json::json!({ "dask": { "config": { "a": false, "b": 1.5, "c": "true" } } });
    let config = spec::from_keys(&keys, "builder").expect("right").dask.config.expect("a section");
    let values: Vec<&str> = config.values().map(String::as_str).collect();
    assert_eq!(values, ["false", "1.5", "true"]);
}

#[test]
fn a_percentage_is_told_as_the_fraction_to_write_where_one_may_be() {
    for key in ["rmm: {pool_size: 80%}", "memory: {limit: 80%}", "device: {memory_limit: '80 %'}"] {
        let said = error(&format!("version: 1\n{key}\n"));
        assert!(said.contains("; write 0.8"), "{key}: {said}");
    }
    for key in ["rmm: {pool_size: 180%}", "logs: {rotate_at: 80%}"] {
        let said = error(&format!("version: 1\n{key}\n"));
        assert!(!said.contains("; write"), "{key}: {said}");
    }
    let said = error("version: 1\nlogs: {rotate_at: 1GB/day}\n");
    assert!(said.contains("a size in bytes") && !said.contains("fraction"), "{said}");
}

#[test]
fn a_path_beside_the_spec_has_no_superfluous_part() {
    let text =
        "version: 1\ndask: {preload: [./setup.py, ../other.py]}\nscheduler: {file: ./a//b}\n";
    let mut spec = spec::parse(text, "spec.yaml").expect("a spec");
    spec.resolve_paths(std::path::Path::new("/home/a/specs"));
    let preload = spec.dask.preload.expect("a list");
    assert_eq!(preload, ["/home/a/specs/setup.py", "/home/a/specs/../other.py"]);
    assert_eq!(spec.scheduler.file.as_deref(), Some("/home/a/specs/a/b"));
}
