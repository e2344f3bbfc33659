//! `cuda-cluster topo` as a person uses it: what it prints, and its errors for bad input.

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn topo(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cuda-cluster"))
        .arg("topo")
        .args(arguments)
        .output()
        .expect("the program starts")
}

/// The error of `topo` for a text on standard input.
fn refusal(text: &str) -> String {
    let mut child = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"))
        .args(["topo", "--topology", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    child.stdin.take().expect("piped").write_all(text.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(output.stdout.is_empty(), "{text}");
    String::from_utf8(output.stderr).expect("text")
}

fn stdout(output: Output) -> String {
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn the_dgx_1_prints_its_published_matrix() {
    insta::assert_snapshot!(stdout(topo(&["--topology", "dgx-1-v100"])));
}

#[test]
fn machines_of_many_kinds_print_their_matrix() {
    for name in [
        "dgx-h100",
        "dgx-station-a100",
        "ibm-ac922",
        "gb200-nvl72-tray",
        "gb300-nvl72-tray",
        "dgx-a100-mig",
    ] {
        insta::assert_snapshot!(name, stdout(topo(&["--topology", name])));
    }
}

#[test]
fn json_has_the_keys_that_programs_rely_on() {
    let text = stdout(topo(&["--topology", "dgx-a100-mig", "-o", "json"]));
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let has = |value: &serde_json::Value, keys: &[&str]| {
        for key in keys {
            assert!(value.get(key).is_some(), "{key} in {value}");
        }
    };
    has(&json, &["version", "gpus", "nics", "numa", "links", "nvswitch", "notes"]);
    has(&json["gpus"][0], &["index", "uuid", "name", "pci", "numa", "cpus", "memory_bytes", "mig"]);
    has(&json["gpus"][0]["mig"][0], &["uuid", "profile", "memory_bytes"]);
    has(&json["nics"][0], &["name", "pci", "numa", "ports"]);
    has(&json["nics"][0]["ports"][0], &["port", "state", "link_layer", "rate_gbps", "netdev"]);
    has(&json["numa"][0], &["id", "cpus", "memory_bytes"]);
    has(&json["links"][0], &["a", "b", "kind"]);
    assert_eq!(json["gpus"][0]["cpus"], "48-63,176-191");
}

#[test]
fn a_bad_document_is_refused_with_line_column_and_key() {
    let cases = [
        ("version: 1\ngpus:\n  - {index: 0, pci: nonsense}\n", "line 3, column 21: gpus[0].pci: "),
        ("version: 1\ngpus:\n  - {index: 0, nuam: 0}\n", "hint: did you mean 'numa'?"),
        (
            "version: 1\ngpus:\n  - {index: 0}\n  - {index: 0}\n",
            "line 4, column 13: gpus[1].index: ",
        ),
        ("version: 1\ngpus:\n  - {index: 0, parent: b}\n", "gpus[0].parent: no bridge \"b\""),
        (
            "version: 1\nnics:\n  - {name: a, pci: null, numa: null, dma: {parent: b}}\n",
            "nics[0].dma.parent: no bridge \"b\"",
        ),
        (
            "version: 1\ngpus: [{index: 0}]\nlinks: [{a: GPU0, b: NIC0, kind: PIX}]\n",
            "line 3, column 8: links: a link to NIC0, but there is no NIC0",
        ),
        (
            "version: 1\nlinks: [{a: GPU0, b: GPU1, kind: NEAR}]\n",
            "links[0].kind: \"NEAR\" is not a link",
        ),
        ("version: 2\n", "line 1, column 10: version: 2 is not supported"),
        ("gpus: []\n", "version: a missing version is not supported"),
        ("version: 1\ngpus: [\n", "not well-formed YAML"),
        ("{\"version\": 1,\n \"gpus\": [{\"index\": true}]}", "line 2, column 21: gpus[0].index: "),
        ("{\"version\": 1,\n \"gpus\": [}", "not well-formed JSON"),
        ("{\"version\": 1} rest", "line 1, column 16: not well-formed JSON: trailing characters"),
        ("hello", "no topology is recognised in this text"),
        ("", "no topology is recognised in this text"),
    ];
    let deep = format!("version: 1\ngpus: {}", "[".repeat(100_000));
    let deep = (deep.as_str(), "not well-formed YAML: it is nested too deeply");
    for (text, words) in cases.into_iter().chain([deep]) {
        let said = refusal(text);
        assert!(said.contains(words), "{text}\nsays {said}\nnot  {words}");
    }
}

#[test]
fn a_plan_that_is_wrong_is_refused_with_line_column_and_key() {
    let deep = format!("version: {}", "[".repeat(100_000));
    let wrong = "version: 2\nname: demo\nengine: dsak\n";
    for (text, words) in [
        (wrong, "line 3, column 9: engine: unknown word \"dsak\"; expected one of native"),
        (deep.as_str(), "it is nested too deeply"),
    ] {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        let path = file.path().to_str().expect("text");
        let output = topo(&["--topology", "dgx-1-v100", "--plan", path, "-o", "tree"]);
        let said = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn a_source_that_cannot_be_read_is_named_with_what_to_do() {
    let said = |src: &str| {
        let output = topo(&["--topology", src]);
        assert_eq!(output.status.code(), Some(2), "{src}");
        String::from_utf8(output.stderr).expect("text")
    };
    assert!(said("dgx-h10").contains("did you mean the built-in machine 'dgx-h100'"));
    assert!(said("/nowhere/zzz").contains("the built-in machines are a100-pcie-4-bridges, "));
    assert!(said("/").contains("is a directory"));
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), b"version: \xff\n").expect("written");
    assert!(said(file.path().to_str().expect("text")).contains("a topology is UTF-8 text"));
}

#[test]
fn two_gpus_of_one_uuid_are_refused_where_the_second_stands() {
    let [first, second] = ["1", "2"].map(|n| format!("GPU-00000000-0000-0000-0000-00000000000{n}"));
    let two = include_str!("../../fuzz/seeds/hwloc/two.xml");
    let said = refusal(&two.replace(&second, &first));
    assert!(said.contains(&format!("a GPU with the UUID {first} is there already")), "{said}");
    assert!(said.contains("line 18, column 11"), "{said}");
}

#[test]
fn the_workers_of_a_plan_stand_below_their_gpus() {
    let plan = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"))
        .args(["plan", "--topology", "dgx-1-v100", "--enable-infiniband", "-o", "yaml"])
        .output()
        .expect("the program starts");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), stdout(plan)).expect("written");
    let path = file.path().to_str().expect("text");
    let with = |form| topo(&["--topology", "dgx-1-v100", "--plan", path, "-o", form]);
    let tree = stdout(with("tree"));
    let below = tree.lines().skip_while(|line| !line.contains("GPU3  ")).nth(1).expect("a worker");
    assert!(below.ends_with("worker gpu3  CPUs 0-19,40-59  mlx5_1"), "{tree}");
    let svg = stdout(with("svg"));
    for worker in 0..8 {
        assert!(svg.contains(&format!("gpu{worker} mlx5_{}", worker / 2)), "{worker}: {svg}");
    }
    assert_eq!(svg.matches("stroke-dasharray=\"4 3\"").count(), 8, "a line to each worker's NIC");
    assert_eq!(with("json").status.code(), Some(2), "a form that has no place for workers");
}
