//! Machine code beside the program: what is loaded, and what leaves the driver to compile PTX.

use std::{env, fs, path::Path};

use kernels::{
    cuda::{CubinError, Cuda, CudaStream, KernelCode, gate::gate_mul},
    elementwise::Gate,
    lora::ElementKind,
};
use sha2::{Digest, Sha256};

use crate::support::{device, is_stand_in, matrix, unwritten};

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Name and PTX of each kernel file, as `build.rs` unpacked them.
fn modules() -> Vec<(String, String)> {
    let folder = Path::new(env!("OUT_DIR")).join("ptx");
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let texts = paths.filter(|path| path.extension().is_some_and(|ending| ending == "ptx"));
    let named = |path: &Path| path.file_stem().unwrap().to_str().unwrap().to_owned();
    texts.map(|path| (named(&path), fs::read_to_string(path).unwrap())).collect()
}

/// Opens the device with a file whose code for a PTX is `code` of it, or `None` without a device.
fn open_with(code: impl Fn(&str) -> Vec<u8>) -> Option<std::sync::Arc<Cuda>> {
    let (major, minor) = device()?.info().capability;
    let (mut head, mut images) = (format!("holobiont cubins 1 sm_{major}{minor}\n"), Vec::new());
    for (name, ptx) in modules() {
        let image = code(&ptx);
        head += &format!("{name} {} {} {}\n", hash(ptx.as_bytes()), hash(&image), image.len());
        images.extend(image);
    }
    let folder = tempfile::tempdir().unwrap();
    let bytes = [head.as_bytes(), b"\n", &images].concat();
    fs::write(folder.path().join(format!("sm_{major}{minor}.cubins")), bytes).unwrap();
    Some(Cuda::open_with_cubins(0, Some(folder.path())).unwrap())
}

fn assert_computes(cuda: &std::sync::Arc<Cuda>) {
    let stream = CudaStream::new(cuda).unwrap();
    let mut out = unwritten(&stream, ElementKind::F32, 1, 1);
    let gate_up = matrix(&stream, ElementKind::F32, 2, &[200.0, 3.0]);
    gate_mul(&stream, Gate::Silu, &gate_up, &mut out).unwrap();
    assert_eq!(out.to_vec(&stream).unwrap(), [600.0]);
}

#[test]
fn a_device_without_a_file_compiles_ptx() {
    if device().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for folder in [None, Some(folder.path())] {
        let cuda = Cuda::open_with_cubins(0, folder).unwrap();
        assert_eq!(*cuda.kernel_code(), KernelCode::Ptx);
    }
}

#[test]
fn machine_code_beside_the_program_is_loaded_and_computes() {
    // The stand-in takes PTX behind this line for machine code.
    let code = |ptx: &str| format!("// cubin for sm_90\n{ptx}").into_bytes();
    if !device().is_some_and(|cuda| is_stand_in(&cuda)) {
        eprintln!("skipped: only the stand-in runs this machine code");
        return;
    }
    let cuda = open_with(code).unwrap();
    let KernelCode::Cubins(path) = cuda.kernel_code() else { panic!("{:?}", cuda.kernel_code()) };
    assert!(path.ends_with("sm_90.cubins"));
    assert_computes(&cuda);
}

#[test]
fn machine_code_that_the_driver_refuses_leaves_the_ptx() {
    let Some(cuda) = open_with(|_| b"\x7fELF, but of no GPU".to_vec()) else { return };
    let KernelCode::PtxInstead(CubinError::Refused { reason, .. }) = cuda.kernel_code() else {
        panic!("{:?}", cuda.kernel_code())
    };
    assert!(!reason.is_empty());
    assert_computes(&cuda);
}

#[test]
fn one_refused_file_of_kernels_leaves_the_code_of_the_others() {
    if !device().is_some_and(|cuda| is_stand_in(&cuda)) {
        return;
    }
    let code = |ptx: &str| {
        let architecture = if ptx.contains("of gate.cu") { "sm_80" } else { "sm_90" };
        format!("// cubin for {architecture}\n{ptx}").into_bytes()
    };
    let cuda = open_with(code).unwrap();
    let KernelCode::PtxInstead(CubinError::Refused { module, .. }) = cuda.kernel_code() else {
        panic!("{:?}", cuda.kernel_code())
    };
    assert_eq!(*module, "gate");
    assert_computes(&cuda);
}

#[test]
fn a_damaged_file_leaves_the_ptx() {
    let Some(cuda) = device() else { return };
    let (major, minor) = cuda.info().capability;
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(format!("sm_{major}{minor}.cubins")), "holobiont cubins 1").unwrap();
    let cuda = Cuda::open_with_cubins(0, Some(folder.path())).unwrap();
    let fault = cuda.kernel_code();
    assert!(matches!(fault, KernelCode::PtxInstead(CubinError::Malformed { .. })), "{fault:?}");
    assert_computes(&cuda);
}
