// Adds a list of the site's versions to the bar of each page. scripts/build-site writes versions.json beside the versions.
(async () => {
  const root = new URL(`${path_to_root}.`, location.href);
  const answer = await fetch(new URL('../versions.json', root));
  if (!answer.ok) return;
  const here = decodeURIComponent(root.pathname.split('/').at(-2));
  const list = document.createElement('select');
  list.setAttribute('aria-label', 'Version of the documentation');
  for (const version of await answer.json()) list.add(new Option(version, version, false, version === here));
  list.addEventListener('change', () => location.assign(new URL(`../${list.value}/index.html`, root)));
  document.querySelector('.right-buttons').prepend(list);
})();
