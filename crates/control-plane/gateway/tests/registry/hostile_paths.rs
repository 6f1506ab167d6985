//! Hostile and wrong paths: rejected with typed errors, and without remains.

use std::{
    os::unix::{ffi::OsStrExt as _, fs::symlink},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use gateway::adapters::{AdapterError, jail::JailError, store::StoreError};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::support::{RegistryHarness, WATCHDOG, files};

fn is_forbidden(error: &AdapterError) -> bool {
    matches!(error, AdapterError::Store(StoreError::Jail(JailError::Forbidden { .. })))
}

fn is_no_file(error: &AdapterError) -> bool {
    matches!(error, AdapterError::Store(StoreError::Jail(JailError::NotAFile(_))))
}

async fn refusal(bench: &RegistryHarness, path: impl AsRef<Path>) -> AdapterError {
    let path = path.as_ref();
    let refused = bench.load_path(path).await;
    let error = refused.map(drop).unwrap_err();
    assert!(bench.registry.is_empty() && bench.stored().is_empty(), "{}", path.display());
    error
}

#[tokio::test]
async fn no_path_leads_out_of_the_root() {
    let bench = RegistryHarness::with_room_for(4).await;
    let outside = files(&bench.path().join("elsewhere"), "secret", "secret");
    let root = bench.path().join("root");
    symlink(&outside, root.join("absolute-link")).unwrap();
    symlink("../elsewhere/root/secret", root.join("relative-link")).unwrap();
    symlink("/proc/self/cwd", root.join("magic")).unwrap();
    std::fs::create_dir(root.join("half")).unwrap();
    std::fs::write(root.join("half/adapter_config.json"), "{}").unwrap();
    symlink(outside.join("adapter_model.safetensors"), root.join("half/adapter_model.safetensors")).unwrap();
    let long = "x/".repeat(3000);
    let cases = [
        "../elsewhere/root/secret",
        "a/../../elsewhere",
        "absolute-link",
        "relative-link",
        "magic",
        "half",
        "/etc",
        "/etc/passwd",
        "nul\0byte",
        &long,
    ];
    for case in cases {
        let error = refusal(&bench, case).await;
        assert!(is_forbidden(&error), "{case:.40}: {error}");
        assert!(error.to_string().len() < 1000, "long paths are not repeated");
    }
    for case in [outside.as_os_str().as_bytes(), b"/proc/self/root"] {
        assert!(is_forbidden(&refusal(&bench, Path::new(std::ffi::OsStr::from_bytes(case))).await));
    }
    let missing = refusal(&bench, "not/there").await;
    assert!(matches!(missing, AdapterError::Store(StoreError::Jail(JailError::Unreadable { .. }))));
}

#[tokio::test]
async fn links_that_stay_inside_and_hard_links_are_read() {
    let bench = RegistryHarness::with_room_for(4).await;
    let root = bench.path().join("root");
    bench.files("real", "one");
    symlink("real", root.join("link")).unwrap();
    bench.load_path("link").await.unwrap();
    // As in a hub's cache: the files of one directory are links into another.
    std::fs::create_dir_all(root.join("hub/snapshot")).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        symlink(format!("../../real/{file}"), root.join("hub/snapshot").join(file)).unwrap();
    }
    bench.load_path("hub/snapshot").await.unwrap();
    let outside = files(&bench.path().join("elsewhere"), "linked", "two");
    std::fs::create_dir(root.join("hard")).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::hard_link(outside.join(file), root.join("hard").join(file)).unwrap();
    }
    bench.load_path(root.join("hard")).await.unwrap();
    assert_eq!(bench.fake.loads(), ["one", "two"], "the first two are the same adapter");
}

#[tokio::test]
async fn pipes_and_devices_are_refused_without_waiting_for_them() {
    let bench = RegistryHarness::with_room_for(4).await;
    let fifo = bench.files("fifo", "x").join("adapter_model.safetensors");
    std::fs::remove_file(&fifo).unwrap();
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    assert!(is_no_file(&refusal(&bench, "fifo").await));
    let device = bench.files("device", "x").join("adapter_model.safetensors");
    std::fs::remove_file(&device).unwrap();
    // Only root may create one; a link to one leads out of the root.
    if mknodat(CWD, &device, FileType::CharacterDevice, Mode::RUSR, makedev(1, 5)).is_ok() {
        assert!(is_no_file(&refusal(&bench, "device").await));
        std::fs::remove_file(&device).unwrap();
    }
    symlink("/dev/zero", &device).unwrap();
    assert!(is_forbidden(&refusal(&bench, "device").await));
    let directory = bench.files("directory", "x").join("adapter_config.json");
    std::fs::remove_file(&directory).unwrap();
    std::fs::create_dir(&directory).unwrap();
    assert!(is_no_file(&refusal(&bench, "directory").await));
}

#[tokio::test]
async fn files_above_the_limit_and_pickles_are_refused_by_name() {
    let bench = RegistryHarness::with_room_for(4).await;
    let path = bench.files("large", "x");
    std::fs::write(path.join("adapter_model.safetensors"), vec![0; (4 << 20) + 1]).unwrap();
    let error = refusal(&bench, "large").await.to_string();
    assert!(
        error.contains("adapter_model.safetensors") && error.contains("--max-adapter-file-bytes"),
        "{error}"
    );
    let path = bench.files("wordy", "x");
    std::fs::write(path.join("adapter_config.json"), vec![b' '; (1 << 20) + 1]).unwrap();
    assert!(refusal(&bench, "wordy").await.to_string().contains("adapter_config.json"));
    let path = bench.files("pickled", "x");
    std::fs::rename(path.join("adapter_model.safetensors"), path.join("adapter_model.bin")).unwrap();
    let error = refusal(&bench, "pickled").await.to_string();
    assert!(error.contains("pickle") && error.contains("safe_serialization=True"), "{error}");
    std::fs::create_dir(bench.path().join("root/nothing")).unwrap();
    assert!(refusal(&bench, "nothing").await.to_string().contains("has no adapter"));
}

#[tokio::test]
async fn a_gguf_adapter_is_loaded_by_its_file_or_its_directory() {
    let bench = RegistryHarness::with_room_for(4).await;
    let directory = bench.path().join("root/gguf");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("pirate-lora.gguf"), "one").unwrap();
    bench.load_path("gguf").await.unwrap();
    bench.load_path("gguf/pirate-lora.gguf").await.unwrap();
    assert_eq!((bench.fake.loads(), bench.stored().len()), (vec!["one".to_owned()], 1));
    std::fs::write(directory.join("other.gguf"), "two").unwrap();
    assert!(bench.load_path("gguf").await.unwrap_err().to_string().contains("several"));
}

#[tokio::test]
async fn a_link_swapped_in_between_never_lets_anything_out() {
    let bench = RegistryHarness::with_room_for(4).await;
    files(&bench.path().join("elsewhere"), "a", "secret");
    bench.files("a", "harmless");
    let root = bench.path().join("root");
    symlink("../elsewhere/root/a", root.join("evil")).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (swapping, stopped) = (root.clone(), Arc::clone(&stop));
    let swapper = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            let exchange = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(CWD, swapping.join("a"), CWD, swapping.join("evil"), exchange).unwrap();
        }
    });
    let (mut loaded, mut refused) = (0, 0);
    let begun = std::time::Instant::now();
    for turn in 0.. {
        let is_run = loaded > 0 && refused > 0 && turn >= 300;
        if is_run || begun.elapsed() > WATCHDOG {
            break;
        }
        match bench.load_path("a").await {
            Ok(_) => loaded += 1,
            Err(_) => refused += 1,
        }
    }
    stop.store(true, Ordering::Relaxed);
    swapper.join().unwrap();
    assert!(bench.fake.loads().iter().all(|weights| weights == "harmless"), "{:?}", bench.fake.loads());
    assert!(loaded > 0 && refused > 0, "the race was run: {loaded} loaded, {refused} refused");
}
