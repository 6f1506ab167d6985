// Light or dark: what the system says, unless somebody has chosen otherwise. The choice is all that this page keeps
// beyond the tab, and only once it has been made.

const KEPT = 'holobiont.theme';
const THEMES = ['system', 'light', 'dark'];
const WORDS = { system: "as the system's", light: 'light', dark: 'dark' };

const chosen = () => (THEMES.includes(localStorage.getItem(KEPT)) ? localStorage.getItem(KEPT) : 'system');

function show() {
  const theme = chosen();
  document.documentElement.dataset.theme = theme;
  const button = document.getElementById('theme');
  button.setAttribute('aria-label', `Colours: ${WORDS[theme]}`);
  button.title = `Colours: ${WORDS[theme]}`;
}

document.getElementById('theme').addEventListener('click', () => {
  const theme = THEMES[(THEMES.indexOf(chosen()) + 1) % THEMES.length];
  if (theme === 'system') localStorage.removeItem(KEPT);
  else localStorage.setItem(KEPT, theme);
  show();
});

show();
