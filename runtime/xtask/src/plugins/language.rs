//! How a plugin of each language is built and tested: the recipes, and nothing else.
//!
//! A recipe returns the path of a finished component without its manifest, somewhere below the plugin's work folder.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use wasi_preview1_component_adapter_provider::{WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER};

use super::{
    Paths, Plugin, Stop,
    toolchain::{self, Log, PythonTools},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    Rust,
    JavaScript,
    Python,
    C,
}

const WORLD: &str = "handler";
const RUST_TARGET: &str = "wasm32-wasip2";

impl Language {
    /// Told by the file that each language's build begins with.
    pub fn of(folder: &Path) -> Option<Self> {
        [(Self::Rust, "Cargo.toml"), (Self::JavaScript, "package.json"), (Self::Python, "src/app.py"), (Self::C, "src/main.c")]
            .into_iter()
            .find_map(|(language, file)| folder.join(file).is_file().then_some(language))
    }

    /// What besides the plugin's own files decides about the result. Lock files in its folder are counted as sources.
    pub fn tool_versions(self, paths: &Paths) -> Result<String> {
        match self {
            Self::Rust => Ok(toolchain::rustc_version()),
            Self::JavaScript => Ok(String::new()),
            Self::Python | Self::C => toolchain::pinned_python_tools(paths),
        }
    }

    pub fn build(self, paths: &Paths, plugin: &Plugin, log: &Log) -> Result<PathBuf, Stop> {
        match self {
            Self::Rust => build_rust(paths, plugin, log),
            Self::JavaScript => build_javascript(paths, plugin, log),
            Self::Python => build_python(paths, plugin, log),
            Self::C => build_c(paths, plugin, log),
        }
    }

    pub fn check(self, paths: &Paths, plugin: &Plugin, log: &Log) -> Result<(), Stop> {
        match self {
            Self::Rust => check_rust(paths, plugin, log),
            Self::JavaScript => check_javascript(plugin, log),
            Self::Python => check_python(plugin, log),
            Self::C => check_c(paths, plugin, log),
        }
    }
}

fn build_rust(paths: &Paths, plugin: &Plugin, log: &Log) -> Result<PathBuf, Stop> {
    toolchain::rust_target(RUST_TARGET)?;
    let target_dir = paths.work(plugin);
    log.run(
        toolchain::cargo()
            .args(["build", "--release", "--locked", "--target", RUST_TARGET, "--target-dir"])
            .arg(&target_dir)
            .current_dir(&plugin.folder),
    )?;
    let file = format!("{}.wasm", plugin.name.replace('-', "_"));
    Ok(target_dir.join(RUST_TARGET).join("release").join(file))
}

fn check_rust(paths: &Paths, plugin: &Plugin, log: &Log) -> Result<(), Stop> {
    Ok(log.run(toolchain::cargo().args(["test", "--locked", "--target-dir"]).arg(paths.work(plugin)).current_dir(&plugin.folder))?)
}

fn build_javascript(paths: &Paths, plugin: &Plugin, log: &Log) -> Result<PathBuf, Stop> {
    let modules = toolchain::npm_packages(paths, plugin, log)?;
    let component = paths.work(plugin).join("component.wasm");
    log.run(
        Command::new("node")
            .arg(modules.join("componentize-qjs/bin/componentize-qjs"))
            .arg("--wit")
            .arg(&paths.wit)
            // Without --sync the component needs an asynchronous component model, which hosts of 0.2 do not have.
            .args(["--js", "src/handler.js", "--world", WORLD, "--sync", "-o"])
            .arg(&component)
            .current_dir(&plugin.folder),
    )?;
    Ok(component)
}

fn check_javascript(plugin: &Plugin, log: &Log) -> Result<(), Stop> {
    toolchain::node()?;
    Ok(log.run(Command::new("node").args(["--test", "test/"]).current_dir(&plugin.folder))?)
}

fn build_python(paths: &Paths, plugin: &Plugin, log: &Log) -> Result<PathBuf, Stop> {
    let tools = PythonTools::install(paths, log)?;
    let component = paths.work(plugin).join("component.wasm");
    // From a copy, because the tool leaves compiled files beside the sources, and carries along what lies there.
    let app = paths.work(plugin).join("app");
    if app.exists() {
        fs::remove_dir_all(&app)?;
    }
    fs::create_dir_all(&app)?;
    for module in with_extension(&plugin.folder.join("src"), "py")? {
        fs::copy(&module, app.join(module.file_name().unwrap_or_default()))?;
    }
    log.run(
        tools
            .tool("componentize-py")
            .arg("--wit-path")
            .arg(&paths.wit)
            .args(["--world", WORLD, "componentize", "app", "-p"])
            .arg(&app)
            .arg("-o")
            .arg(&component),
    )?;
    Ok(component)
}

fn check_python(plugin: &Plugin, log: &Log) -> Result<(), Stop> {
    let python = toolchain::python()?;
    for test in with_extension(&plugin.folder.join("test"), "py")? {
        log.run(Command::new(python).arg("-B").arg(test).current_dir(&plugin.folder))?;
    }
    Ok(())
}

fn build_c(paths: &Paths, plugin: &Plugin, log: &Log) -> Result<PathBuf, Stop> {
    let tools = PythonTools::install(paths, log)?;
    let work = paths.work(plugin);
    let file = |name: &str| work.join(name);

    log.run(
        tools
            .python()
            .args(["-m", "ziglang", "cc", "--target=wasm32-wasi", "-mexec-model=reactor", "-O3", "-Wall", "-Wextra"])
            // The default stack takes 16 MiB of every instance.
            .args(["-Wl,-z,stack-size=65536", "-o"])
            .arg(file("core.wasm"))
            .args(with_extension(&plugin.folder.join("src"), "c")?)
            .args(with_extension(&plugin.folder.join("gen"), "c")?)
            .args(with_extension(&plugin.folder.join("gen"), "o")?)
            .env("ZIG_GLOBAL_CACHE_DIR", paths.toolchains().join("zig"))
            .env("ZIG_LOCAL_CACHE_DIR", file("zig"))
            .current_dir(&plugin.folder),
    )?;
    // Function names stay, so that a trap's backtrace says where it happened; the rest is a megabyte of line tables.
    log.run(tools.tool("wasm-tools").args(["strip", "--delete", r"^\.debug"]).arg(file("core.wasm")).arg("-o").arg(file("stripped.wasm")))?;

    let adapter = file("adapter.wasm");
    fs::write(&adapter, WASI_SNAPSHOT_PREVIEW1_REACTOR_ADAPTER)?;
    log.run(
        tools
            .tool("wasm-tools")
            .args(["component", "new"])
            .arg(file("stripped.wasm"))
            .arg("--adapt")
            .arg(format!("{WASI_SNAPSHOT_PREVIEW1_ADAPTER_NAME}={}", adapter.display()))
            .arg("-o")
            .arg(file("component.wasm")),
    )?;
    Ok(file("component.wasm"))
}

/// The machine's own compiler and every source but the one that talks to the host.
fn check_c(paths: &Paths, plugin: &Plugin, log: &Log) -> Result<(), Stop> {
    let program = paths.work(plugin).join("native-test");
    let sources = with_extension(&plugin.folder.join("src"), "c")?.into_iter().filter(|file| !file.ends_with("main.c"));
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .args(sources)
        .args(with_extension(&plugin.folder.join("test"), "c")?);
    if Command::new("cc").arg("--version").output().is_err() {
        return Err(Stop::Missing("a C compiler named cc".into()));
    }
    log.run(&mut cc)?;
    Ok(log.run(&mut Command::new(&program))?)
}

/// Sorted, because the order of a directory is nobody's choice and the linker lays out code in the order it is given.
fn with_extension(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("failed to read {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
