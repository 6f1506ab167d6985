//! Adapters that belong to one tenant.

use gateway::{
    adapters::{AdapterError, Registry, Terms},
    caller::KeyRole,
};
use types::TenantId;

use crate::support::{BASE, RegistryHarness, caller};

async fn load_for(
    bench: &RegistryHarness,
    name: &str,
    weights: &str,
    tenant: &str,
) -> Result<(), AdapterError> {
    let mut request = bench.request(name, weights);
    request.tenant = Some(tenant.to_owned());
    bench.registry.load(request, BASE.into()).await.map(drop)
}

#[tokio::test]
async fn a_private_adapter_is_there_for_its_tenant_and_for_administrators_alone() {
    let bench = RegistryHarness::with_room_for(4).await;
    load_for(&bench, "private", "w", "alice").await.unwrap();
    let sees = |tenant, role| bench.registry.lease("private", &caller(tenant, role)).unwrap().is_some();
    assert!(sees("alice", KeyRole::User));
    assert!(sees("operator", KeyRole::Admin));
    assert!(!sees("bob", KeyRole::User));
    assert!(!sees("bob", KeyRole::Metrics));
    let bench = bench.reopen().await;
    assert!(bench.registry.lease("private", &caller("bob", KeyRole::User)).unwrap().is_none());
}

#[tokio::test]
async fn the_same_bytes_of_two_tenants_share_nothing() {
    let bench = RegistryHarness::with_room_for(4).await;
    load_for(&bench, "a", "same", "alice").await.unwrap();
    load_for(&bench, "b", "same", "bob").await.unwrap();
    let (alice, bob) = (TenantId::of(Some("alice")), TenantId::of(Some("bob")));
    assert!(bench.fake.holds(alice, "same") && bench.fake.holds(bob, "same"));
    assert_eq!((bench.fake.held(), bench.stored().len()), (2, 2));
    bench.registry.unload("a", None).await.unwrap();
    assert!(!bench.fake.holds(alice, "same") && bench.fake.holds(bob, "same"));
}

#[tokio::test]
async fn two_names_of_one_tenant_share_one_copy_until_the_second_goes() {
    let bench = RegistryHarness::with_room_for(4).await;
    load_for(&bench, "a", "same", "alice").await.unwrap();
    load_for(&bench, "b", "same", "alice").await.unwrap();
    assert_eq!((bench.fake.held(), bench.stored().len()), (1, 1));
    assert_eq!(bench.registry.unload("a", None).await.unwrap(), 0, "b needs it");
    assert_eq!(bench.registry.unload("b", None).await.unwrap(), 1000);
    assert_eq!((bench.fake.held(), bench.stored().len()), (0, 0));
}

#[tokio::test]
async fn replacing_keeps_the_owner_and_never_gives_it_to_somebody_else() {
    let bench = RegistryHarness::with_room_for(4).await;
    load_for(&bench, "a", "one", "alice").await.unwrap();
    bench.load("a", "two").await.unwrap();
    assert_eq!(bench.registry.entries()["a"].record.tenant.as_deref(), Some("alice"));
    assert!(matches!(load_for(&bench, "a", "three", "bob").await, Err(AdapterError::OtherTenant(_))));
    for tenant in ["", "a b", "../x", &"t".repeat(65)] {
        assert!(
            matches!(load_for(&bench, "b", "w", tenant).await, Err(AdapterError::BadTenant(_))),
            "{tenant}"
        );
    }
}

/// Publishes an adapter of a tenant, as a fine-tuning job or a Tinker model does.
async fn publish(
    bench: &RegistryHarness,
    registry: &std::sync::Arc<Registry>,
    name: &str,
    tenant: &str,
) -> Result<(), AdapterError> {
    let mut request = bench.request(name, name);
    request.tenant = Some(tenant.to_owned());
    registry.load_made(request, BASE.into(), Terms::default()).await.map(drop)
}

#[tokio::test]
async fn one_tenant_publishes_half_of_the_registry_and_leaves_the_rest_to_others() {
    let bench =
        RegistryHarness::with_room_for(8).await.with_options(|options| options.max_adapters = 5).await;
    let registry = std::sync::Arc::clone(&bench.registry);
    for name in ["a", "b", "c"] {
        publish(&bench, &registry, name, "alice").await.unwrap();
    }
    let refused = publish(&bench, &registry, "d", "alice").await.unwrap_err();
    assert!(matches!(refused, AdapterError::TenantFull { adapters: 3, max_adapters: 3, .. }), "{refused}");
    assert!(refused.to_string().contains("--max-adapters"), "{refused}");
    publish(&bench, &registry, "c", "alice").await.expect("an adapter takes the place of its own name");
    publish(&bench, &registry, "e", "bob").await.expect("others have a share of their own");
    load_for(&bench, "f", "f", "alice").await.expect("an administrator is bound by the registry alone");
    bench.registry.unload("f", None).await.unwrap();
    bench.registry.unload("a", None).await.unwrap();
    publish(&bench, &registry, "d", "alice").await.expect("what is removed makes room");
    assert_eq!(bench.stored().len(), 4, "nothing is left of what was refused");
}

#[tokio::test]
async fn the_bytes_that_a_tenant_publishes_are_bounded() {
    // An adapter takes 1000 bytes of this executor.
    let bench =
        RegistryHarness::with_room_for(8).await.with_options(|options| options.tenant_bytes = 2000).await;
    let registry = std::sync::Arc::clone(&bench.registry);
    for name in ["a", "b"] {
        publish(&bench, &registry, name, "alice").await.unwrap();
    }
    let long = "long".repeat(40);
    let refused = publish(&bench, &registry, &long, "alice").await.unwrap_err();
    assert!(matches!(refused, AdapterError::TenantFull { held_bytes: 2000, .. }), "{refused}");
    publish(&bench, &registry, &long, "bob").await.unwrap();
}

#[tokio::test]
async fn the_bytes_of_a_chat_template_count_to_its_tenant() {
    let bench =
        RegistryHarness::with_room_for(8).await.with_options(|options| options.tenant_bytes = 1500).await;
    let mut request = bench.request("a", "a");
    request.tenant = Some("alice".to_owned());
    std::fs::write(request.path.join("chat_template.jinja"), "t".repeat(700)).unwrap();
    bench.registry.load_made(request, BASE.into(), Terms::default()).await.unwrap();
    let refused = publish(&bench, &bench.registry, "b", "alice").await.unwrap_err();
    assert!(matches!(refused, AdapterError::TenantFull { held_bytes: 1700, .. }), "{refused}");
    publish(&bench, &bench.registry, "b", "bob").await.unwrap();
}

#[tokio::test]
async fn names_of_models_of_tinkers_api_are_refused_to_administrators() {
    let bench = RegistryHarness::with_room_for(2).await;
    for name in ["tinker-x~y", "tinker-", "tinker-0123-name"] {
        let refused = bench.load(name, "w").await.unwrap_err();
        assert!(matches!(refused, AdapterError::ReservedName(_)), "{name}: {refused}");
        let files = bench.files("files", "w");
        let refused = bench.registry.load_trusted(name, &files, BASE.into()).await.unwrap_err();
        assert!(matches!(refused, AdapterError::ReservedName(_)), "{name}: {refused}");
    }
    assert_eq!(bench.stored().len(), 0);
    publish(&bench, &bench.registry, "tinker-x~1", "alice").await.expect("models publish under such names");
    assert_eq!(
        gateway::training_sessions::checkpoint_path::adapter("run", "name"),
        "tinker-run-name",
        "the prefix is theirs"
    );
}
